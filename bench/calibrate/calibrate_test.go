//go:build linux

package calibrate

import (
	"bytes"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/bench/host"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tools/sim/calibrate"
	"github.com/srtm-io/srtm/tools/sim/scenario"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func loads() []calibrate.Load {
	return []calibrate.Load{
		{Publishers: 20, Rate: 2000, Batch: 1, Duration: 4 * time.Second, Seed: 1},
		{Publishers: 20, Rate: 10_000, Batch: 10, Duration: 4 * time.Second, Seed: 2},
	}
}

// A broker of known parameters in place of a real one: the file that comes out
// has drlsim reproduce it.
func TestTheCalibrationIsOneThatDrlsimReads(t *testing.T) {
	broker := calibrate.Parameters{Wake: 20_000, Message: 9000, P50: 80_000, P99: 400_000, P999: 500_000}
	var runs []measured
	for _, l := range loads() {
		f := testkit.Result(calibrate.Simulate(l, broker)).Must(t)
		runs = append(runs, measured{Measurement: calibrate.Measurement{Load: l, Figures: f}})
	}
	made := testkit.Result(fitted(config{slo: time.Millisecond, messages: 10_000, args: []string{"--out=x"}}, runs)).Must(t)
	made.Commit, made.Kernel, made.Machine = "c", "k", "m"
	for _, r := range made.Runs {
		if math.Abs(r.ErrorP50) > 0.1 || math.Abs(r.ErrorP99) > 0.1 || math.Abs(r.Simulated.CPU/r.Measured.CPU-1) > 0.1 {
			t.Errorf("%g msg/s: measured %+v, simulated %+v", r.Rate, r.Measured, r.Simulated)
		}
	}
	if mcap := made.Models["default"].Mcap; mcap != 2000 {
		t.Errorf("mcap %d, want the only rate of single messages", mcap)
	}
	file := filepath.Join(t.TempDir(), "c.json")
	testkit.Must(t, host.WriteJSON(file, made))
	read := testkit.Result(scenario.ReadCalibration(file)).Must(t)
	if !reflect.DeepEqual(read, made) {
		t.Errorf("%+v was written, %+v is read", made, read)
	}

	_, err := fitted(config{slo: time.Microsecond}, runs)
	testkit.ErrorHas(t, err, "raise --slo", "no rate is within the SLO")
}

// The calibration in the repository says of itself what drlsim makes of it.
func TestTheCommittedCalibrationReproducesItsRuns(t *testing.T) {
	file := filepath.Join(testkit.Root(t), "docs", "evaluation", "calibration.json")
	c, err := scenario.ReadCalibration(file)
	testkit.Must(t, err)
	if len(c.Runs) < 2 || c.Commit == "" || c.Kernel == "" || c.Machine == "" || c.CPUs < 1 {
		t.Fatalf("provenance: %+v", c)
	}
	for _, r := range c.Runs {
		got, err := simulate(file, calibrate.Load{
			Publishers: r.Publishers, Rate: r.Rate, Batch: r.Batch, Duration: time.Duration(r.Seconds * float64(time.Second)), Seed: r.Seed,
		})
		testkit.Must(t, err)
		if figures(got) != r.Simulated {
			t.Errorf("%g msg/s in batches of %d: simulated %+v, the file says %+v", r.Rate, r.Batch, figures(got), r.Simulated)
		}
	}
}

func TestBadFlags(t *testing.T) {
	bin := t.TempDir()
	for args, want := range map[string]string{
		"":                             "--out is needed",
		"--out=x rest":                 `unexpected argument "rest"`,
		"--out=x --publishers=0":       "--publishers 0: want 1 to 10000",
		"--out=x --duration=1h":        "--duration 1h0m0s: want 100ms to 1m",
		"--out=x --messages=1":         "--messages 1: want 1000 to 10000000",
		"--out=x --slo=0s":             "--slo 0s is not above 0",
		"--out=x --loads=5,x":          `--loads "x": want a rate of 1 to 1000000 msg/s`,
		"--out=x --loads=5,NaN":        `--loads "NaN": want a rate`,
		"--out=x --loads=5,10/0":       `--loads "10/0": want a batch of 1 to 1000 messages`,
		"--out=x --loads=500":          "--loads: 1, want 2 or more",
		"--out=x --loads=50/2,500/10":  "--loads: want one of single messages",
		"--out=x --nonsense":           "flag provided but not defined",
		"--out=x --bin-dir=" + bin:     "run make build",
		"--out= --publishers=0":        "--publishers 0: want 1 to 10000",
		"--out=x --loads=1000,2000000": `--loads "2000000": want a rate`,
	} {
		var out bytes.Buffer
		err := Run(t.Context(), strings.Fields(args), &out, &out)
		testkit.ErrorHas(t, err, want, "%q", args)
		if _, err := os.Stat("x"); err == nil {
			t.Fatalf("%q: left a file", args)
		}
	}
}
