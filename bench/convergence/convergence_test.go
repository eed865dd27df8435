package convergence

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tools/iotpub/report"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// By rate alone, the topic of every row fits on one broker. The topic's burst is enough for its own
// schedule.
func TestTheContract(t *testing.T) {
	c := testkit.Result(parse(nil, io.Discard)).Must(t)
	for _, group := range c.rows {
		sold := testkit.Result(profile(c.spec(group), c.slo, c.margin)).Must(t)
		// A group passes at once.
		if sold.RateMilli != 660_000 || sold.Burst < int64(group*10) {
			t.Errorf("groups of %d: r %d, b %d", group, sold.RateMilli, sold.Burst)
		}
	}
}

func TestTheTable(t *testing.T) {
	r := Report{Version: "SRTM x", CPUs: 2, Args: []string{"--seed=7"}, Rows: []Row{
		{Group: 5, Mode: modeOff, K: 1, Check: Check{Late: 0.001, Met: new(true), Delivery: report.Quantiles{P99Us: 5000}, Processing: report.Quantiles{P99Us: 5000}}},
		{
			Group: 30, Mode: "fast", K: 4, Fit: &Fit{Seconds: 61.25, Rounds: []Rounds{{1, 1}, {4, 1}}},
			Check:      Check{Late: 0.0234, Met: new(false), Delivery: report.Quantiles{P99Us: 15_000}, Access: report.Quantiles{P99Us: 100}},
			Publishers: Publishers{Late: report.Quantiles{P99Us: 1500}},
		},
	}}
	var b bytes.Buffer
	r.WriteText(&b)
	testkit.Golden(t, "testdata/table.txt", b.Bytes())
}

func TestBadFlags(t *testing.T) {
	for args, want := range map[string]string{
		"rest":                          `unexpected argument "rest"`,
		"--rows=1":                      `--rows "1": want numbers of 2 to all 300 publishers`,
		"--rows=5,x":                    `--rows "x"`,
		"--rows=40 --publishers=30":     `--rows "40": want numbers of 2 to all 30 publishers`,
		"--modes=slow":                  `--modes "slow" is none of off, fast, paper`,
		"--brokers=0":                   "--brokers 0: want 1 to 20",
		"--pace=1us":                    "--pace 1µs: want 20us to 1s",
		"--slo=0s":                      "--slo 0s is not above 0",
		"--margin=-1":                   "--margin -1: want 0 to 100",
		"--mcap=-1":                     "--mcap -1: want 1 or more",
		"--margin=NaN":                  "--margin NaN",
		"--round=0s":                    "--round 0s: want 1s or more",
		"--check=0s":                    "--check 0s: want 1s to 10m",
		"--limit=2h":                    "--limit 2h0m0s: want 1s to 1h",
		"--rate=0 --batch=0":            "rate: 0 msg/s",
		"--process=slow":                `process: "slow"`,
		"--nonsense":                    "flag provided but not defined",
		"--bin-dir=" + t.TempDir():      "run make convergence",
		"--brokers=0 --modes=a --slo=0": "--brokers 0",
	} {
		var out bytes.Buffer
		err := Run(t.Context(), strings.Fields(args), &out, &out)
		testkit.ErrorHas(t, err, want, "%q", args)
	}
}

// Runs one row with real processes. The SLO is wide, so that other load on the machine does not decide
// the result.
func TestRowWithRealProcesses(t *testing.T) {
	bin := t.TempDir()
	build := exec.CommandContext(t.Context(), "go", "build", "-tags=paced", "-o", bin+string(filepath.Separator), "./nsqd", "./loaddistributor", "./tbadaptor", "./tools/iotpub")
	build.Dir = testkit.Root(t)
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	file := filepath.Join(t.TempDir(), "rows.json")
	var out, errs bytes.Buffer
	err := Run(t.Context(), []string{
		"--bin-dir=" + bin, "--json=" + file, "--rows=5", "--modes=fast", "--brokers=2", "--publishers=30", "--rate=10", "--batch=2",
		"--slo=5s", "--check=5s", "--limit=2m",
	}, &out, &errs)
	if err != nil {
		t.Fatalf("%v\n%s", err, errs.String())
	}
	text := testkit.Result(os.ReadFile(file)).Must(t)
	var r Report
	testkit.Must(t, json.Unmarshal(text, &r))
	testkit.MustEqual(t, len(r.Rows), 1, "%+v", r)
	row := r.Rows[0]
	if row.Fit == nil || !row.Fit.Fitted || !reflect.DeepEqual(row.Fit.Rounds, []Rounds{{1, 1}}) || row.K != 1 || row.State != srtmv1.TopicState_TOPIC_STATE_ACTIVE.String() {
		t.Errorf("%+v, %+v", row, row.Fit)
	}
	if c := row.Check; c.Met == nil || !*c.Met || c.Late != 0 || c.Messages == 0 || c.Delivery.Count != int64(c.Messages) {
		t.Errorf("%+v", c)
	}
	if p := row.Publishers; p.Accepted == 0 || p.Accepted != p.Sent {
		t.Errorf("%+v", p)
	}
	if !strings.Contains(out.String(), "met") {
		t.Error(out.String())
	}
}
