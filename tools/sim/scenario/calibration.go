package scenario

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/tools/sim/engine"
)

// Paper is the built-in calibration. It matches the paper's statements about its brokers;
// the file lists these statements.
const Paper = "paper"

//go:embed paper.json
var paper []byte

// Calibration describes the speed of brokers, by model.
type Calibration struct {
	MadeBy string           `json:"made_by"` // how the models were chosen
	Models map[string]Model `json:"models"`  // includes "default"
}

// Model is an engine.Model and its mcap, with times in microseconds. Each distribution is
// a list of [fraction, value], the points of its quantile function.
type Model struct {
	Servers  int          `json:"servers"`
	Mcap     int64        `json:"mcap"`
	Wake     [][2]float64 `json:"wake_us"`
	Message  [][2]float64 `json:"message_us"`
	Overhead [][2]float64 `json:"overhead_us"`
}

// DefaultModel is the model of brokers without a named model.
const DefaultModel = "default"

// ReadCalibration reads a built-in calibration or a file.
func ReadCalibration(name string) (*Calibration, error) {
	var text []byte
	switch name {
	case Paper:
		text = paper
	default:
		var err error
		if text, err = os.ReadFile(name); err != nil {
			return nil, fmt.Errorf("calibration: %w", err)
		}
	}
	c := &Calibration{}
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(c); err != nil {
		return nil, fmt.Errorf("calibration %s: %w", name, err)
	}
	if err := c.Validate(); err != nil {
		return nil, fmt.Errorf("calibration %s: %w", name, err)
	}
	return c, nil
}

// Validate returns every fault at once, joined, or nil.
func (c *Calibration) Validate() error {
	var f faults.List
	_, ok := c.Models[DefaultModel]
	f.If(!ok, "models: there is no %q", DefaultModel)
	for _, name := range c.names() {
		_, _, err := c.Model(name)
		f.Add(err)
	}
	return f.Err()
}

func (c *Calibration) names() []string { return slices.Sorted(maps.Keys(c.Models)) }

// Model returns the named model and its mcap. "" is the default.
func (c *Calibration) Model(name string) (engine.Model, int64, error) {
	setDefault(&name, DefaultModel)
	m, ok := c.Models[name]
	if !ok {
		return engine.Model{}, 0, fmt.Errorf("no model %q: there are %v", name, c.names())
	}
	model := engine.Model{Servers: m.Servers}
	var f faults.List
	for _, d := range []struct {
		field string
		in    [][2]float64
		out   *engine.Dist
	}{{"wake_us", m.Wake, &model.Wake}, {"message_us", m.Message, &model.Message}, {"overhead_us", m.Overhead, &model.Overhead}} {
		points := make([]engine.Point, len(d.in))
		for i, p := range d.in {
			f.If(!(math.Abs(p[1]) <= 1e12), "%s: %v us", d.field, p[1])
			points[i] = engine.Point{At: p[0], Value: time.Duration(math.Round(p[1] * 1000))}
		}
		dist, err := engine.NewDist(points)
		f.If(err != nil, "%s: %w", d.field, err)
		*d.out = dist
	}
	f.Add(model.Validate())
	f.If(m.Mcap < 1, "mcap: %d, want 1 or more", m.Mcap)
	if err := f.Err(); err != nil {
		return engine.Model{}, 0, fmt.Errorf("model %q: %w", name, err)
	}
	return model, m.Mcap, nil
}
