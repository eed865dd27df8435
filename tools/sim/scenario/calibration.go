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

// Paper is a calibration that is built in. It was chosen so that what the paper
// says of its brokers holds; the file says what that is.
const Paper = "paper"

//go:embed paper.json
var paper []byte

// Calibration says how fast brokers are, by model.
type Calibration struct {
	// MadeBy is the command that measured it, or how it was chosen; Machine what
	// it was measured on.
	MadeBy  string           `json:"made_by"`
	Machine string           `json:"machine,omitempty"`
	Commit  string           `json:"commit,omitempty"` // of the broker that was measured
	Kernel  string           `json:"kernel,omitempty"`
	CPUs    int              `json:"cpus,omitempty"`
	Models  map[string]Model `json:"models"` // "default" among them
	// Runs are the measurements that the default model was fitted to. Nothing is
	// simulated by them.
	Runs []CalibrationRun `json:"runs,omitempty"`
}

// CalibrationRun is a load, what a broker made of it, and what drlsim run makes of
// it with the calibration. Times are in microseconds.
type CalibrationRun struct {
	Publishers int                `json:"publishers"`
	Rate       float64            `json:"rate"` // of all
	Batch      int                `json:"batch"`
	Seconds    float64            `json:"seconds"`
	Seed       uint64             `json:"seed"`
	SentLate   int64              `json:"sent_late_p99_us"` // by the emulator, after the schedule
	Measured   CalibrationFigures `json:"measured"`
	Simulated  CalibrationFigures `json:"simulated"`
	// ErrorP50 and ErrorP99 are what the simulated quantile is more than the
	// measured one, as a fraction of it.
	ErrorP50 float64 `json:"error_p50"`
	ErrorP99 float64 `json:"error_p99"`
}

// CalibrationFigures are quantiles of the processing delay, and the processor time
// for each message.
type CalibrationFigures struct {
	P50  float64 `json:"p50_us"`
	P99  float64 `json:"p99_us"`
	P999 float64 `json:"p999_us"`
	CPU  float64 `json:"cpu_us"`
}

// Model is an engine.Model and its mcap, with times in microseconds. Each
// distribution is a list of [fraction, value]: points of its quantile function.
type Model struct {
	Servers  int          `json:"servers"`
	Mcap     int64        `json:"mcap"`
	Wake     [][2]float64 `json:"wake_us"`
	Message  [][2]float64 `json:"message_us"`
	Overhead [][2]float64 `json:"overhead_us"`
}

// DefaultModel is the model of brokers that name none.
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

// Model returns the model of a name, "" being the default, and its mcap.
func (c *Calibration) Model(name string) (engine.Model, int64, error) {
	or(&name, DefaultModel)
	m, ok := c.Models[name]
	if !ok {
		return engine.Model{}, 0, fmt.Errorf("no model %q: there are %v", name, c.names())
	}
	out := engine.Model{Servers: m.Servers}
	var f faults.List
	for _, d := range []struct {
		field string
		in    [][2]float64
		out   *engine.Dist
	}{{"wake_us", m.Wake, &out.Wake}, {"message_us", m.Message, &out.Message}, {"overhead_us", m.Overhead, &out.Overhead}} {
		points := make([]engine.Point, len(d.in))
		for i, p := range d.in {
			f.If(!(math.Abs(p[1]) <= 1e12), "%s: %v us", d.field, p[1])
			points[i] = engine.Point{At: p[0], Value: time.Duration(math.Round(p[1] * 1000))}
		}
		dist, err := engine.NewDist(points)
		f.If(err != nil, "%s: %w", d.field, err)
		*d.out = dist
	}
	f.Add(out.Validate())
	f.If(m.Mcap < 1, "mcap: %d, want 1 or more", m.Mcap)
	if err := f.Err(); err != nil {
		return engine.Model{}, 0, fmt.Errorf("model %q: %w", name, err)
	}
	return out, m.Mcap, nil
}
