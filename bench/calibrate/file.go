//go:build linux

package calibrate

import (
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/srtm-io/srtm/bench/host"
	"github.com/srtm-io/srtm/tools/sim/calibrate"
	"github.com/srtm-io/srtm/tools/sim/scenario"
)

// otherSeed sets the check's chance apart from the fit's.
const otherSeed = 1000

// checkMessages are simulated of each load for the check, so many that its p99 is
// hardly a matter of chance.
const checkMessages = 200_000

// lasting is how long a load takes to send so many messages.
func lasting(l calibrate.Load, messages int) time.Duration {
	return time.Duration(float64(messages) / l.Rate * 1e9)
}

// fitted makes the calibration of measurements, and simulates each of them with
// it as drlsim run does.
func fitted(c config, runs []measured) (*scenario.Calibration, error) {
	var measurements []calibrate.Measurement
	mcap := int64(0)
	for _, m := range runs {
		precise := m.Measurement
		precise.Duration = lasting(m.Load, c.messages)
		measurements = append(measurements, precise)
		if m.Batch == 1 && m.P99 <= c.slo {
			mcap = max(mcap, int64(m.Rate))
		}
	}
	if mcap == 0 {
		return nil, fmt.Errorf("no load of single messages has its p99 within %v: lower --loads or raise --slo", c.slo)
	}
	p, err := calibrate.Fit(measurements)
	if err != nil {
		return nil, err
	}
	model := scenario.Model{Servers: 1, Mcap: mcap, Wake: [][2]float64{{0, micros(p.Wake)}}, Message: [][2]float64{{0, micros(p.Message)}}}
	for _, point := range p.Overhead() {
		model.Overhead = append(model.Overhead, [2]float64{point.At, micros(point.Value)})
	}
	made := &scenario.Calibration{
		MadeBy: "go run ./bench calibrate " + strings.Join(c.args, " "), CPUs: runtime.NumCPU(),
		Models: map[string]scenario.Model{scenario.DefaultModel: model},
	}
	folder, err := os.MkdirTemp("", "calibrate-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(folder)
	// What is checked is what the simulator reads from a file.
	file := filepath.Join(folder, "calibration.json")
	if err := host.WriteJSON(file, made); err != nil {
		return nil, err
	}
	for _, m := range runs {
		simulated, err := simulate(file, m.Load)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name(m.Load), err)
		}
		made.Runs = append(made.Runs, scenario.CalibrationRun{
			Publishers: m.Publishers, Rate: m.Rate, Batch: m.Batch, Seconds: m.Duration.Seconds(), Seed: m.Seed, SentLate: m.sentLate,
			Measured: figures(m.Figures), Simulated: figures(simulated),
			ErrorP50: excess(simulated.P50, m.P50), ErrorP99: excess(simulated.P99, m.P99),
		})
	}
	return made, nil
}

// simulate is drlsim run: the load as a topic on one broker, under a contract
// that it never meets.
func simulate(file string, l calibrate.Load) (calibrate.Figures, error) {
	built, err := scenario.New(scenario.Scenario{
		Seed: l.Seed + otherSeed, Duration: lasting(l, checkMessages).Seconds(), Calibration: file,
		Brokers: []scenario.Broker{{ID: "b", Count: 1}},
		Topics: []scenario.Topic{{
			Name: "t", K: 1, Load: scenario.Load{Publishers: l.Publishers, Rate: l.Rate / float64(l.Publishers), Batch: l.Batch},
			Contract: scenario.Contract{Rate: 10 * l.Rate, Burst: 100_000},
		}},
	})
	if err != nil {
		return calibrate.Figures{}, err
	}
	r, err := scenario.Run(built)
	if err != nil {
		return calibrate.Figures{}, err
	}
	t := r.Topics[0]
	if t.Messages == 0 {
		return calibrate.Figures{}, errors.New("the simulation delivered nothing")
	}
	q := t.Processing
	return calibrate.Figures{
		P50: time.Duration(q.P50), P99: time.Duration(q.P99), P999: time.Duration(q.P999),
		CPU: time.Duration(r.Brokers[0].Busy * built.Scenario.Duration * 1e9 / float64(t.Messages)),
	}, nil
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 }

func figures(f calibrate.Figures) scenario.CalibrationFigures {
	return scenario.CalibrationFigures{P50: micros(f.P50), P99: micros(f.P99), P999: micros(f.P999), CPU: micros(f.CPU)}
}

// excess is what got is more than want, in thousandths of it.
func excess(got, want time.Duration) float64 {
	return math.Round((float64(got)/float64(want)-1)*1000) / 1000
}

func table(out io.Writer, c *scenario.Calibration) {
	m := c.Models[scenario.DefaultModel]
	fmt.Fprintf(out, "commit %s, kernel %s, %d processors\nwake %v us, message %v us, mcap %d msg/s\n", c.Commit, c.Kernel, c.CPUs, m.Wake[0][1], m.Message[0][1], m.Mcap)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "msg/s\tbatch\tp50 us\tsimulated\terror\tp99 us\tsimulated\terror\tCPU us\tsimulated\t")
	for _, r := range c.Runs {
		fmt.Fprintf(w, "%g\t%d\t%.0f\t%.0f\t%+.1f %%\t%.0f\t%.0f\t%+.1f %%\t%.1f\t%.1f\t\n", r.Rate, r.Batch,
			r.Measured.P50, r.Simulated.P50, 100*r.ErrorP50, r.Measured.P99, r.Simulated.P99, 100*r.ErrorP99, r.Measured.CPU, r.Simulated.CPU)
	}
	_ = w.Flush() // as every print to standard output
}
