package plan_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tools/srtm/plan"
)

// execute runs `srtm plan` and returns its output and its exit code.
func execute(t *testing.T, stdin string, args ...string) (out string, code int, err error) {
	t.Helper()
	var w bytes.Buffer
	cmd := plan.Command()
	cmd.SetArgs(args)
	cmd.SetIn(strings.NewReader(stdin))
	cmd.SetOut(&w)
	cmd.SetErr(&w)
	if err = cmd.Execute(); err != nil {
		var coded program.ExitError
		switch {
		case errors.As(err, &coded):
			code = coded.Code
		case errors.As(err, &program.UsageError{}):
			code = 2
		default:
			code = 1
		}
	}
	return w.String(), code, err
}

func TestGolden(t *testing.T) {
	for _, c := range []struct {
		scenario, policy, output string
		code                     int
	}{
		{"design.json", "srtm", "json", 0},
		{"design.json", "srtm", "table", 0},
		{"design.json", "conc", "json", 0},
		{"design.json", "maxmin", "json", 0},
		{"design.json", "loadbalance", "table", 0},
		{"figure8.json", "srtm", "table", 0},
		{"figure8.json", "conc", "table", 0},
		{"quotas-only.json", "srtm", "json", 0},
		{"fractional.json", "srtm", "json", 0},
		{"full.json", "srtm", "json", 3},
		{"full.json", "srtm", "table", 3},
		{"burst.json", "loadbalance", "json", 3},
		{"nobody.json", "srtm", "json", 3},
	} {
		name := strings.TrimSuffix(c.scenario, ".json") + "." + c.policy + "." + c.output
		t.Run(name, func(t *testing.T) {
			file := filepath.Join("testdata", c.scenario)
			out, code, err := execute(t, "", "--file", file, "--policy", c.policy, "--output", c.output, "--seed", "7")
			if code != c.code {
				t.Fatalf("exit code %d (%v), want %d", code, err, c.code)
			}
			testkit.Golden(t, filepath.Join("testdata", "golden", name), []byte(out))

			input := testkit.Result(os.ReadFile(file)).Must(t)
			piped, code, _ := execute(t, string(input), "--file", "-", "--policy", c.policy, "--output", c.output, "--seed", "7")
			if piped != out || code != c.code {
				t.Errorf("from standard input: exit code %d and\n%s", code, piped)
			}
		})
	}
}

func TestTheSeedDecidesAndNothingElse(t *testing.T) {
	args := func(seed string) []string {
		return []string{"--file", "testdata/design.json", "--policy", "maxmin", "--output", "json", "--seed", seed}
	}
	a, _, _ := execute(t, "", args("1")...)
	b, _, _ := execute(t, "", args("1")...)
	c, _, _ := execute(t, "", args("2")...)
	testkit.Equal(t, a, b, "the same seed gave two answers")
	if a == c {
		t.Error("seeds 1 and 2 split every group alike: publishers are not placed at random")
	}
}

func TestBadInput(t *testing.T) {
	const broker = `"brokers":[{"id":"b1","mcap":64000}]`
	const topic = `"topic":{"name":"t","rate":80000,"burst":100}`
	for _, c := range []struct {
		name, input string
		want        []string // all errors, a line each
	}{
		{"nothing", "", []string{"standard input: is empty"}},
		{"not JSON", "{\n\"brokers\": [}", []string{"line 2"}},
		{"cut off", `{` + broker, []string{"unexpected EOF"}},
		{"two scenarios", "{" + broker + "," + topic + "}\n{}", []string{"line 2: more input"}},
		{"not an object", `[1]`, []string{"scenario: is a list, want an object"}},
		{"null", `null`, []string{"scenario: is null, want an object"}},
		{"empty object", `{}`, []string{"brokers: is missing", "topic: is missing"}},
		{"unknown fields, all of them", `{"brokers":[{"id":"b1","mcap":1,"cap":2}],"topic":{"name":"t","rate":1,"burst":1,"color":3},"x":4}`,
			[]string{"brokers[0].cap: unknown field", "topic.color: unknown field", "x: unknown field"}},
		{"names are case sensitive", `{"Brokers":[],` + topic + `}`, []string{"Brokers: unknown field", "brokers: is missing"}},
		{"repeated field", `{` + broker + `,` + topic + `,` + topic + `}`, []string{"topic: appears twice"}},
		{"wrong types", `{"brokers":{},"topic":{"name":1,"rate":"fast","burst":true,"groups":[7]}}`,
			[]string{"brokers: is an object, want a list", "topic.name: is 1, want a text", `topic.rate: is the text "fast"`,
				"topic.burst: is true", "topic.groups[0]: is 7, want an object"}},
		{"fractions of what is whole", `{"brokers":[{"id":"b1","mcap":1.5}],"topic":{"name":"t","rate":1.0005,"burst":2.5}}`,
			[]string{"brokers[0].mcap: is 1.5, want a whole number", "topic.rate: is 1.0005", "topic.burst: is 2.5"}},
		{"out of range", `{"brokers":[{"id":"b1","mcap":1e30}],"topic":{"name":"t","rate":1e999999999,"burst":1e-999999999}}`,
			[]string{"brokers[0].mcap: 1e30 is out of range", "topic.rate: 1e999999999 is out of range", "topic.burst: is 1e-999999999, want a whole number"}},
		{"faults of form and of content together", `{"brokers":[{"id":"b1","mcap":-5},{"id":"b1","mcap":1,"allocated":-1}],"topic":{"rate":0,"burst":0,"nme":"t"}}`,
			[]string{"topic.nme: unknown field", "topic.name: is missing", "brokers[0].mcap: -5", `brokers[1].id: "b1" is the id of brokers[0]`,
				"brokers[1].allocated: -1", "topic.rate: 0 msg/s", "topic.burst: 0 messages"}},
		{"faults of groups", `{` + broker + `,"topic":{"name":"t","rate":10,"burst":1,"groups":[{"key":"g","count":0,"rate":1},{"key":"g","count":5,"rate":0},{"count":2000000,"rate":1,"batch":-1}]}}`,
			[]string{"topic.groups[0].count: 0", "topic.groups[1].key", "topic.groups[1].rate: 0", "topic.groups[2].count: 2000000", "topic.groups[2].batch: -1"}},
		{"publishers beyond the contract", `{` + broker + `,"topic":{"name":"t","rate":10,"burst":1,"publishers":[{"id":"p","rate":10.5}]}}`,
			[]string{"topic.rate: the publishers' rates sum to 10.5"}},
		{"publishers twice", `{` + broker + `,"topic":{"name":"t","rate":10,"burst":1,"publishers":[{"id":"g.1","rate":1},{"id":"p","rate":1},{"id":"p","rate":1}],"groups":[{"key":"g","count":2,"rate":1}]}}`,
			[]string{`topic.publishers[2].id: "p" is the id of publishers[1] too`, `topic.publishers[0].id: "g.1" is the id of a publisher of groups[0]`}},
	} {
		out, code, err := execute(t, c.input, "--file", "-", "--output", "json")
		if code != 1 || out != "" {
			t.Errorf("%s: exit code %d and output %q, want 1 and nothing", c.name, code, out)
			continue
		}
		for _, want := range c.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %q does not say %q", c.name, err, want)
			}
		}
		if !namedInEachLine(err) {
			t.Errorf("%s: a line without the file: %q", c.name, err)
		}
	}
}

// namedInEachLine reports whether no line begins with text of the input.
func namedInEachLine(err error) bool {
	for line := range strings.SplitSeq(err.Error(), "\n") {
		if !strings.HasPrefix(line, "standard input: ") {
			return false
		}
	}
	return true
}

func TestAFaultOfFormIsReportedOnce(t *testing.T) {
	_, _, err := execute(t, `{"brokers":[{},{}],"topic":7}`, "--file", "-")
	const want = "standard input: brokers[0].id: is missing\nstandard input: brokers[0].mcap: is missing\n" +
		"standard input: brokers[1].id: is missing\nstandard input: brokers[1].mcap: is missing\nstandard input: topic: is 7, want an object"
	if err == nil || err.Error() != want {
		t.Errorf("%v\nwant %s", err, want)
	}
}

func TestBadFlags(t *testing.T) {
	for _, args := range [][]string{
		{},
		{"--file", "testdata/design.json", "--policy", "best"},
		{"--file", "testdata/design.json", "--output", "xml"},
	} {
		if out, code, err := execute(t, "", args...); code != 2 || out != "" {
			t.Errorf("%v: exit code %d (%v) and output %q, want 2 and nothing", args, code, err, out)
		}
	}
	if _, code, err := execute(t, "", "--file", "testdata/none.json"); code != 1 || !strings.HasPrefix(err.Error(), "testdata/none.json: ") {
		t.Errorf("a missing file: exit code %d, %v", code, err)
	}
}

// For any input there is an answer or a reason, never both, and never a panic.
func FuzzScenario(f *testing.F) {
	files, err := filepath.Glob("testdata/*.json")
	if err != nil || len(files) == 0 {
		f.Fatalf("no scenarios to start from: %v", err)
	}
	for _, file := range files {
		input := testkit.Result(os.ReadFile(file)).Must(f)
		f.Add(string(input))
	}
	f.Add(`{"brokers":[{"id":"a","mcap":1e3}],"topic":{"name":"t","rate":0.5,"burst":1,"publishers":[{"id":"p","rate":0.5}]}}`)
	f.Add(`{"brokers" : [ { "id" : "\ud800" , "mcap" : -0 } ] , "topic" : { "rate" : 1E+2 , "rate" : null } }`)
	f.Add(`{"topic":{"groups":[[],{"count":1e-1000000000}]}}`)
	f.Fuzz(func(t *testing.T, input string) {
		out, code, err := execute(t, input, "--file", "-", "--output", "json")
		switch code {
		case 0, 3:
			var a struct {
				K          int
				Quotas     []json.RawMessage
				Infeasible *struct{ Need, Have int64 }
			}
			if jsonErr := json.Unmarshal([]byte(out), &a); jsonErr != nil {
				t.Fatalf("%v in %q", jsonErr, out)
			}
			if a.K != len(a.Quotas) || (a.Infeasible != nil) != (code == 3) || (err != nil) != (code == 3) {
				t.Fatalf("exit code %d, %v with %s", code, err, out)
			}
		case 1:
			if out != "" || err == nil || !namedInEachLine(err) {
				t.Fatalf("%q, %v", out, err)
			}
		default:
			t.Fatalf("exit code %d: %v", code, err)
		}
	})
}
