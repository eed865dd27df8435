package figures

import (
	"encoding/csv"
	"errors"
	"fmt"
	"image/color"
	"math"
	"os"
	"path/filepath"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"
)

// write writes the panels and rows of a figure into a folder.
func (k *work) write(folder, name string) error {
	for _, p := range k.panels {
		if err := p.table(filepath.Join(folder, p.id+".csv")); err != nil {
			return err
		}
		if len(p.series) == 0 {
			continue
		}
		if err := p.draw(filepath.Join(folder, p.id+".svg")); err != nil {
			return fmt.Errorf("%s: %w", p.id, err)
		}
	}
	return writeRows(filepath.Join(folder, "rows-"+name+".csv"), k.rows)
}

func (p *panel) table(path string) error {
	return writeCSV(path, append([][]string{p.header}, p.rows...))
}

func writeCSV(path string, rows [][]string) (err error) {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	w := csv.NewWriter(f)
	if err := w.WriteAll(rows); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// least replaces 0 on a logarithmic scale.
const least = 0.01

func (p *panel) draw(path string) error {
	plt := plot.New()
	plt.Title.Text = p.title
	plt.X.Label.Text, plt.Y.Label.Text = p.xLabel, p.yLabel
	plt.Title.TextStyle.Font.Size, plt.Legend.TextStyle.Font.Size = vg.Points(11), vg.Points(9)
	plt.Legend.Top, plt.Legend.Left = true, true
	plt.Add(plotter.NewGrid())
	lowest, highest := math.Inf(1), math.Inf(-1)
	for i, s := range p.series {
		points := make(plotter.XYs, len(s.x))
		errs := make(plotter.YErrors, len(s.x))
		for j := range s.x {
			y := s.y[j]
			if p.logY {
				y = max(y, least)
			}
			points[j] = plotter.XY{X: s.x[j], Y: y}
			if len(s.err) > 0 {
				errs[j].High = s.err[j]
				errs[j].Low = s.err[j]
				if p.logY {
					errs[j].Low = min(s.err[j], y-min(y, least))
				}
			}
			lowest, highest = min(lowest, y-errs[j].Low), max(highest, y+errs[j].High)
		}
		line, scatter, err := plotter.NewLinePoints(points)
		if err != nil {
			return fmt.Errorf("series %s: %w", s.name, err)
		}
		line.Color, scatter.Color = plotutil.Color(i), plotutil.Color(i)
		line.Width = vg.Points(1.3)
		line.Dashes = plotutil.Dashes(i)
		scatter.Shape = plotutil.Shape(i)
		plt.Add(line, scatter)
		plt.Legend.Add(s.name, line, scatter)
		if len(s.err) > 0 {
			bars, err := plotter.NewYErrorBars(struct {
				plotter.XYs
				plotter.YErrors
			}{points, errs})
			if err != nil {
				return fmt.Errorf("series %s: %w", s.name, err)
			}
			bars.Color = plotutil.Color(i)
			plt.Add(bars)
		}
		if len(s.labels) > 0 {
			labels, err := plotter.NewLabels(plotter.XYLabels{XYs: points, Labels: s.labels})
			if err != nil {
				return fmt.Errorf("series %s: %w", s.name, err)
			}
			labels.Offset = vg.Point{X: vg.Points(4), Y: vg.Points(4)}
			for j := range labels.TextStyle {
				labels.TextStyle[j].Color = plotutil.Color(i)
				labels.TextStyle[j].Font.Size = vg.Points(8)
			}
			plt.Add(labels)
		}
	}
	if p.limit > 0 {
		limit := plotter.NewFunction(func(float64) float64 { return p.limit })
		limit.Color = color.Gray{Y: 110}
		limit.Dashes = []vg.Length{vg.Points(2), vg.Points(3)}
		plt.Add(limit)
		plt.Legend.Add("SLO", limit)
		lowest, highest = min(lowest, p.limit), max(highest, p.limit)
	}
	if p.logX {
		plt.X.Scale, plt.X.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
	}
	if p.logY {
		plt.Y.Scale, plt.Y.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
		// Whole decades around the data, and room for the legend.
		plt.Y.Min = math.Pow(10, math.Floor(math.Log10(max(lowest, least/2))))
		plt.Y.Max = math.Pow(10, math.Ceil(math.Log10(highest)+0.4))
	} else {
		plt.Y.Min, plt.Y.Max = 0, highest*1.25
	}
	return plt.Save(13*vg.Centimeter, 9*vg.Centimeter, path)
}
