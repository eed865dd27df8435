package main

import (
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

const groups = `{"name":"groups","seed":3,"duration_s":3,"warmup_s":0.5,"brokers":[{"id":"a","mcap":6000,"background":{"publishers":5,"rate":100,"batch":10}},{"id":"b","count":2,"mcap":3000}],
 "topics":[{"name":"t","publishers":60,"rate":10,"batch":2,"group_size":6,"sync":true,"noise_ms":4,"process":"periodic","at_least":2},
           {"name":"big","publishers":10,"rate":1000}]}`

// Other programs read these bytes.
func TestRunGolden(t *testing.T) {
	for _, form := range []string{"json", "table"} {
		testkit.Golden(t, "testdata/run_groups."+form, []byte(mustRun(t, groups, "run", "--scenario", "-", "--output", form)))
	}
	testkit.Equal(t, mustRun(t, groups, "run", "--scenario", "-", "--seed", "3"), mustRun(t, groups, "run", "--scenario", "-"), "--seed 3 differs from the scenario's own 3")
	if a, b := mustRun(t, groups, "run", "--scenario", "-", "--seed", "4"), mustRun(t, groups, "run", "--scenario", "-"); a == b {
		t.Error("--seed 4 is no different from 3")
	}
}

func TestRunRefuses(t *testing.T) {
	for _, c := range []struct {
		stdin, want string
		args        []string
		code        int
	}{
		{"", "missing --scenario", nil, 2},
		{groups, "unknown output", []string{"--scenario", "-", "--output", "xml"}, 2},
		{"{}", "duration_s: 0", []string{"--scenario", "-"}, 1},
		{"", "no such file", []string{"--scenario", "/nonexistent.json"}, 1},
		{strings.Replace(groups, `"seed":3`, `"calibration":"/nonexistent.json"`, 1), "no such file", []string{"--scenario", "-"}, 1},
	} {
		code, stdout, stderr := drlsim(c.stdin, append([]string{"run"}, c.args...)...)
		if code != c.code || stdout != "" || !strings.Contains(stderr, c.want) {
			t.Errorf("%v: exit code %d, %q, %q; want %d and %q", c.args, code, stdout, stderr, c.code, c.want)
		}
	}
}
