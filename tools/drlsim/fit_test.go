package main

import (
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestFitGolden(t *testing.T) {
	const topic = `{"duration_s":10,"brokers":[{"id":"b","count":3}],"topics":[{"name":"t","publishers":200,"rate":10,"batch":10,"group_size":20,"sync":true,"process":"periodic","contract":{"margin":1}}]}`
	for _, form := range []string{"json", "table"} {
		out := mustRun(t, topic, "fit", "--scenario", "-", "--mode", "fast,paper", "--round", "5s", "--check", "10s", "--output", form)
		testkit.Golden(t, "testdata/fit."+form, []byte(out))
	}
	out := mustRun(t, "", "convergence", "--groups", "10", "--first-seed", "2", "--mode", "fast,warm", "--cap", "5s", "--check", "5s", "--output", "table")
	// The warm run starts with the result of the first run, so only the first run starts with one broker.
	if lines := strings.Count(out, "\n"); lines != 3 || strings.Count(out, "groups of 10, seed 2") != 2 || strings.Count(out, " 1x1 ") != 1 {
		t.Errorf("%s", out)
	}
}

func TestFitRefuses(t *testing.T) {
	for want, args := range map[string][]string{
		"missing --scenario": {"fit"},
		"unknown mode":       {"fit", "--scenario", "-", "--mode", "slow"},
		"--alpha 2":          {"convergence", "--alpha", "2"},
		"--round":            {"convergence", "--round", "0s"},
		"--seeds 0":          {"convergence", "--seeds", "0"},
		"--first-seed 0":     {"convergence", "--first-seed", "0"},
		"--aim":              {"convergence", "--aim", "0s"},
		"unknown output":     {"convergence", "--output", "xml"},
		"margin":             {"convergence", "--margin", "-1"},
	} {
		if code, stdout, stderr := drlsim("", args...); code != 2 || stdout != "" || !strings.Contains(stderr, want) {
			t.Errorf("%v: exit code %d, %q, %q; want 2 and %q", args, code, stdout, stderr, want)
		}
	}
}
