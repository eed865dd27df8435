package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// drlsim runs a command line.
func drlsim(stdin string, args ...string) (code int, stdout, stderr string) {
	var out, err bytes.Buffer
	code = run(args, strings.NewReader(stdin), &out, &err)
	return code, out.String(), err.String()
}

// mustRun runs a command line twice. Both runs must succeed and print the same bytes.
func mustRun(t *testing.T, stdin string, args ...string) string {
	t.Helper()
	code, first, stderr := drlsim(stdin, args...)
	if code != 0 || stderr != "" {
		t.Fatalf("drlsim %s: exit code %d, %s", strings.Join(args, " "), code, stderr)
	}
	if _, second, _ := drlsim(stdin, args...); second != first {
		t.Fatalf("drlsim %s: the second run printed something else:\n%s\n%s", strings.Join(args, " "), first, second)
	}
	return first
}

// bursts returns a trace of groups that fire together now and then, in order.
func bursts() string {
	rng := rand.New(rand.NewPCG(3, 0))
	var b strings.Builder
	at := 0.0
	for range 12 {
		at += rng.ExpFloat64() * 0.02
		group := rng.IntN(3)
		for member := range 1 + rng.IntN(5) {
			fmt.Fprintf(&b, "%.6f,g%d,g%d.%d\n", at+float64(member)*0.0001, group, group, member)
		}
	}
	return b.String()
}

// Other programs read these bytes.
func TestBucketGolden(t *testing.T) {
	for _, assign := range []string{"roundrobin", "random", "keyed"} {
		for _, form := range []string{"json", "table"} {
			got := mustRun(t, bursts(), "bucket", "--arrivals", "-", "--rate", "150.5", "--burst", "10", "--split", "3", "--assign", assign, "--seed", "7", "--output", form)
			testkit.Golden(t, filepath.Join("testdata", "bucket_"+assign+"."+form), []byte(got))
		}
	}
	got := mustRun(t, bursts(), "bucket", "--arrivals", "-", "--rate", "150.5", "--burst", "10", "--output", "table")
	testkit.Golden(t, "testdata/bucket_whole.table", []byte(got))
}

func TestHelpGolden(t *testing.T) {
	for _, command := range []string{"theory", "bucket", "run", "fit", "convergence", "mqos", "link"} {
		testkit.Golden(t, filepath.Join("testdata", command+".help"), []byte(mustRun(t, "", command, "--help")))
	}
}

func TestSeedDecidesRandomAndNothingElse(t *testing.T) {
	delays := func(assign, seed string) string {
		var r struct {
			BucketOf json.RawMessage `json:"bucket_of"`
		}
		out := mustRun(t, bursts(), "bucket", "--arrivals", "-", "--rate", "100", "--burst", "10", "--split", "3", "--assign", assign, "--seed", seed)
		testkit.Must(t, json.Unmarshal([]byte(out), &r))
		return string(r.BucketOf)
	}
	if a, b := delays("random", "1"), delays("random", "2"); a == b {
		t.Errorf("seeds 1 and 2 both gave %s", a)
	}
	for _, assign := range []string{"roundrobin", "keyed"} {
		if a, b := delays(assign, "1"), delays(assign, "2"); a != b {
			t.Errorf("%s: seeds 1 and 2 gave %s and %s", assign, a, b)
		}
	}
}

func TestBucketReadsAFile(t *testing.T) {
	file := testkit.File(t, "a.csv", bursts())
	args := []string{"bucket", "--rate", "100", "--burst", "10", "--arrivals"}
	if a, b := mustRun(t, bursts(), append(args, "-")...), mustRun(t, "", append(args, file)...); a != b {
		t.Errorf("standard input gave %s, a file %s", a, b)
	}
}

func TestTheory(t *testing.T) {
	for _, c := range []struct {
		args string
		want map[string]float64
	}{
		{"--lambda 10000 --rate 11000 --burst 26", map[string]float64{
			"expected_delay_eq1_s": 4.305612242610737e-06, "expected_delay_exact_s": 4.171007588668626e-06, "p_delayed": 0.008611224485221477}},
		{"--lambda 1 --rate 2 --burst 1 --output json", map[string]float64{
			"expected_delay_eq1_s": 0.25, "expected_delay_exact_s": 0.25, "p_delayed": 0.5}},
		{"--lambda 833 --rate 917 --burst 2.1667", map[string]float64{
			"expected_delay_eq1_s": 0.004474909385666823, "expected_delay_exact_s": 0.004340812843852046, "p_delayed": 0.7517847767920266}},
		{"--lambda 0 --rate 2 --burst 1", map[string]float64{
			"expected_delay_eq1_s": 0, "expected_delay_exact_s": 0, "p_delayed": 0}},
		{"--rho 0.9 --tail 4", map[string]float64{"tail": 0.4075454099135263}},
		{"--rho 0.5 --tail 0", map[string]float64{"tail": 0.5}},
		{"--rho 0 --tail -1", map[string]float64{"tail": 1}},
	} {
		out := mustRun(t, "", append([]string{"theory"}, strings.Fields(c.args)...)...)
		var got map[string]float64
		if err := json.Unmarshal([]byte(out), &got); err != nil {
			t.Fatalf("%s: %v in %s", c.args, err, out)
		}
		if len(got) != len(c.want) {
			t.Errorf("%s printed %s, want the keys of %v", c.args, out, c.want)
		}
		for key, want := range c.want {
			// The last bits may differ, because some processors round a product and a sum in one step.
			if v, ok := got[key]; !ok || math.Abs(v-want) > 1e-12*want {
				t.Errorf("%s: %s is %v, want %v", c.args, key, v, want)
			}
		}
	}
	testkit.Equal(t, mustRun(t, "", "theory", "--rho", "0.5", "--tail", "0", "--output", "table"), "tail  0.5\n", "table")
	want := "expected access delay, exact    0.25 s\nexpected access delay, Eq. (1)  0.25 s\nmessages that wait              0.5\n"
	testkit.Equal(t, mustRun(t, "", "theory", "--lambda", "1", "--rate", "2", "--burst", "1", "--output", "table"), want, "table")
}

// Each mistake gives a line on standard error and nothing on standard output. The exit code is 2 for a wrong command
// line and 1 for a wrong input.
func TestMistakes(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "none.csv")
	for _, c := range []struct {
		code  int
		args  string
		stdin string
		want  string
	}{
		{2, "nonsense", "", `unknown command "nonsense"`},
		{2, "theory nonsense", "", `theory takes no argument, only flags: "nonsense"`},
		{2, "bucket nonsense", "", `bucket takes no argument, only flags: "nonsense"`},
		{2, "theory --nonsense", "", "unknown flag: --nonsense"},
		{2, "theory --lambda x", "", `invalid argument "x" for "--lambda"`},
		{2, "theory", "", "missing --lambda, --rate, --burst, or --rho, --tail"},
		{2, "theory --lambda 1 --burst 2", "", "missing --rate"},
		{2, "theory --rho 0.5", "", "missing --tail"},
		{2, "theory --rho 0.5 --tail 1 --burst 3", "", "give one set"},
		{2, "theory --rho 1 --tail 1", "", "rho 1 is not from 0 to below 1"},
		{2, "theory --rho NaN --tail inf", "", "rho NaN is not from 0 to below 1\ndrlsim: tail +Inf is not a finite number"},
		{2, "theory --lambda 11 --rate 11 --burst 1", "", "lambda 11 is not below rate 11"},
		{2, "theory --lambda 1 --rate 2 --burst 0.99", "", "burst 0.99 is outside 1 to 1000000000"},
		{2, "theory --lambda 1 --rate 2 --burst nan", "", "burst NaN is outside 1 to 1000000000"},
		{2, "theory --lambda -1 --rate 0 --burst 0", "", "lambda -1 is not 0 or more\ndrlsim: rate 0 is not more than 0\ndrlsim: burst 0 is outside 1 to 1000000000"},
		{2, "theory --lambda nan --rate inf --burst 1", "", "lambda NaN is not 0 or more\ndrlsim: rate +Inf is not more than 0"},
		{2, "theory --rho 0.5 --tail 1 --output xml", "", `unknown output "xml": there are json, table`},
		{2, "bucket", "", "missing --arrivals, --rate, --burst"},
		{2, "bucket --arrivals - --rate 1", "", "missing --burst"},
		{2, "bucket --arrivals - --rate 0 --burst 1", "1", "rate 0 is outside 0.001 to 1000000000 messages per second"},
		{2, "bucket --arrivals - --rate -1 --burst 1", "1", "rate -1 is outside"},
		{2, "bucket --arrivals - --rate nan --burst 1", "1", "rate 0 is outside"},
		{2, "bucket --arrivals - --rate 1 --burst 0", "1", "burst 0 is outside 1 to 1000000000 messages"},
		{2, "bucket --arrivals - --rate 1 --burst 3 --split 4", "1", "split 4 is more than burst 3: every bucket needs a token"},
		{2, "bucket --arrivals - --rate 0.003 --burst 9 --split 4", "1", "split 4 is more than the thousandths of the rate, 0.003 messages per second"},
		{2, "bucket --arrivals - --rate 1 --burst 3 --split 0", "1", "split 0 is outside 1 to 100000"},
		{2, "bucket --arrivals - --rate 1 --burst 3 --assign any", "1", `unknown assignment "any": there are keyed, random, roundrobin`},
		{2, "bucket --arrivals - --rate 1 --burst 3 --seed -1", "1", `invalid argument "-1" for "--seed"`},
		{2, "bucket --arrivals - --rate 1 --burst 3 --output xml", "1", `unknown output "xml"`},
		{1, "run --scenario -", `{"duration_s":1e6,"brokers":[{"id":"b"}],"topics":[{"name":"t","publishers":1000,"rate":1000}]}`, "1e+12 messages, want 1e+11 at most"},
		{1, "bucket --arrivals - --rate 1 --burst 3", "", "standard input: no arrivals in it"},
		{1, "bucket --arrivals - --rate 1 --burst 3", "1\nx\n", `standard input:2: "x" is not a time in seconds`},
		{1, "bucket --arrivals " + missing + " --rate 1 --burst 3", "", "none.csv: no such file or directory"},
	} {
		code, stdout, stderr := drlsim(c.stdin, strings.Fields(c.args)...)
		if code != c.code || stdout != "" || !strings.HasPrefix(stderr, "drlsim: ") || !strings.Contains(stderr, c.want) || strings.Count(stderr, "\n") != 1+strings.Count(c.want, "\n") {
			t.Errorf("drlsim %s: exit code %d, stdout %q, stderr %q; want code %d and %q, a line each", c.args, code, stdout, stderr, c.code, c.want)
		}
	}
}

func TestHelpAndVersion(t *testing.T) {
	if got := mustRun(t, ""); !strings.Contains(got, "theory") || !strings.Contains(got, "bucket") {
		t.Errorf("without arguments it printed %q, want the help", got)
	}
	if got := mustRun(t, "", "--version"); !strings.HasPrefix(got, "drlsim, SRTM ") {
		t.Errorf("the version is %q", got)
	}
}

// full is a device without space.
type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no space left") }

func TestOutputThatCannotBeWritten(t *testing.T) {
	for _, args := range []string{
		"theory --rho 0.5 --tail 1", "theory --rho 0.5 --tail 1 --output table",
		"bucket --arrivals - --rate 1 --burst 3", "bucket --arrivals - --rate 1 --burst 3 --output table",
	} {
		var stderr bytes.Buffer
		code := run(strings.Fields(args), strings.NewReader("1\n"), full{}, &stderr)
		if code != 1 || !strings.Contains(stderr.String(), "no space left") {
			t.Errorf("drlsim %s: exit code %d, %q", args, code, stderr.String())
		}
	}
}

func TestLinkGolden(t *testing.T) {
	args := strings.Fields("link --capacity 10Mbps --rtt 20ms --flows 5 --duration 3s --control level --output")
	for _, form := range []string{"json", "table"} {
		testkit.Golden(t, "testdata/link."+form, []byte(mustRun(t, "", append(args, form)...)))
	}
	for text, want := range map[string]string{
		"--capacity 5":                      `--capacity "5": want a number`,
		"--buffer big":                      `--buffer "big": want a number`,
		"--flows 0 --control own --tos 256": "0 flows: want 1 to 10000",
	} {
		if code, _, stderr := drlsim("", append([]string{"link"}, strings.Fields(text)...)...); code != 2 || !strings.Contains(stderr, want) {
			t.Errorf("%s: exit code %d, %s; want 2 and %q", text, code, stderr, want)
		}
	}
}
