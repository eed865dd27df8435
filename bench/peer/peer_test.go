//go:build linux

package peer

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tools/load"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestTablesHoldMediansAndRatios(t *testing.T) {
	list := []load.Scenario{{Name: "a", What: "what", Rate: 1, Size: 100}, {Name: "b", What: "flood", Size: 1}, {Name: "c", What: "unseen", Rate: 1}}
	some := 3.0
	runs := []load.Result{
		{Scenario: "a", Peer: "x", P99: 1, CPU: 10}, {Scenario: "a", Peer: "x", P99: 3, CPU: 20, Mallocs: &some}, {Scenario: "a", Peer: "x", P99: 2, CPU: 30},
		{Scenario: "a", Peer: "y", P99: 4, CPU: 5}, {Scenario: "a", Peer: "y", Round: 2, Error: "it broke"},
		{Scenario: "b", Peer: "y", OutPerSecond: 1000},
	}
	var out bytes.Buffer
	testkit.Must(t, writeTables(&out, list, []string{"x", "y"}, runs))
	testkit.Golden(t, filepath.Join("testdata", "tables.golden"), out.Bytes())
}

func TestThePageSaysWhatIsMetAndWhatIsNot(t *testing.T) {
	list := scenarios()
	list = slices.DeleteFunc(list, func(s load.Scenario) bool { return s.Name != "poisson-1000" && s.Name != "mpub" && s.Name != "idle" })
	r := report{
		Commit: "c", Kernel: "k", CPUs: 2, Go: "go", Seed: 1, Lasting: "2s", Flags: []string{"--nsq=upstream=/some/where/nsqd", "--set=full", "--srtm=bin/nsqd"},
		Brokers: []broker{{"srtm", "1"}, {"upstream", "2"}, {"upstream-unbuffered", "2"}, {"nats", "3"}, {"mosquitto", "4"}},
		Runs: []load.Result{
			{Scenario: "poisson-1000", Peer: "srtm", P50: 0.1, P99: 0.31, CPU: 20, RSS: 20}, {Scenario: "poisson-1000", Peer: "srtm", P50: 0.1, P99: 0.9, CPU: 21, RSS: 20},
			{Scenario: "poisson-1000", Peer: "upstream-unbuffered", P50: 0.2, P99: 1, CPU: 50, RSS: 40},
			{Scenario: "poisson-1000", Peer: "nats", P50: 0.2, P99: 0.5, CPU: 50, RSS: 40}, {Scenario: "poisson-1000", Peer: "mosquitto", P50: 0.05, P99: 0.2, CPU: 30, RSS: 9},
			{Scenario: "mpub", Peer: "srtm", InPerSecond: 150, OutPerSecond: 90}, {Scenario: "mpub", Peer: "upstream", InPerSecond: 100, OutPerSecond: 100},
			{Scenario: "idle", Peer: "srtm", P99: 1, PerConn: 3000},
		},
	}
	var out bytes.Buffer
	testkit.Must(t, r.writePage(&out, list))
	testkit.Golden(t, filepath.Join("testdata", "page.golden"), out.Bytes())

	// Two files make the same page as one file with the runs of both.
	files := []string{filepath.Join(t.TempDir(), "a.json"), filepath.Join(t.TempDir(), "b.json")}
	write := func(file string, r report) {
		text, err := json.Marshal(r)
		testkit.Must(t, errors.Join(err, os.WriteFile(file, text, 0o600)))
	}
	part := r
	part.Runs = r.Runs[:3]
	write(files[0], part)
	part.Runs = r.Runs[3:]
	write(files[1], part)
	both, err := merged(files)
	if err != nil || len(both.Runs) != len(r.Runs) {
		t.Fatalf("%d runs of %d, %v", len(both.Runs), len(r.Runs), err)
	}
	var again bytes.Buffer
	if err := both.writePage(&again, list); err != nil || again.String() != out.String() {
		t.Errorf("merged: %v\n%s", err, &again)
	}
	part.Commit = "another"
	write(files[1], part)
	_, err = merged(files)
	testkit.ErrorHas(t, err, "does not match", "reports of two commits")
	write(files[1], report{})
	if _, err := merged(files); err == nil {
		t.Error("an empty report is no error")
	}
}

func TestTargetsAreOfWhatThereIs(t *testing.T) {
	for _, want := range targets {
		c := columnOf(want.figure)
		i := slices.IndexFunc(scenarios(), func(s load.Scenario) bool { return s.Name == want.scenario })
		if i < 0 || !c.shows(scenarios()[i]) || c.compared == uncompared || want.bound <= 0 || len(want.others) == 0 {
			t.Errorf("%+v", want)
		}
	}
	columnOf("bytes/conn")
}

func TestNoRunBeginsWhenTimeIsUp(t *testing.T) {
	var progress bytes.Buffer
	c := config{scenarios: scenarios(), peers: []load.Broker{load.Ours("/not/there", "")}, rounds: 2, startLimit: time.Nanosecond}
	if runs := c.all(t.Context(), &progress); len(runs) != 0 || !strings.Contains(progress.String(), "stopped in round 1") {
		t.Errorf("%d runs; %q", len(runs), &progress)
	}
}

func TestFlags(t *testing.T) {
	self := testkit.Result(os.Executable()).Must(t)
	c, err := parse([]string{"--srtm=" + self, "--nsq=up=" + self, "--nats=/not/there", "--only=srtm,up,nats", "--scenarios=tls,idle", "--seed=7"}, io.Discard)
	if err != nil || len(c.peers) != 2 || c.peers[1].Name != "up" || len(c.skipped) != 1 || len(c.scenarios) != 2 || c.seed != 7 {
		t.Errorf("%+v, %v", c, err)
	}
	c, err = parse([]string{"--srtm=" + self, "--before=" + self, "--ttl", "--only=srtm,srtm-before,srtm-ttl"}, io.Discard)
	if err != nil || len(c.peers) != 3 || c.peers[1].Name != "srtm-before" || c.peers[2].Name != "srtm-ttl" || c.peers[2].Prepare == nil {
		t.Errorf("%+v, %v", c, err)
	}
	if c, err := parse([]string{"--srtm=" + self, "--scenarios=all"}, io.Discard); err != nil || len(c.scenarios) != len(scenarios()) {
		t.Errorf("%d scenarios, %v", len(c.scenarios), err)
	}
	c, err = parse([]string{"--srtm=" + self, "--set=full", "--rounds=2"}, io.Discard)
	if err != nil || len(c.scenarios) != len(scenarios()) || c.rounds != 2 || c.lasting != 2*time.Second || c.startLimit != 25*time.Minute {
		t.Errorf("the full set: %+v, %v", c, err)
	}
	for _, args := range []string{"--set=some", "--within=-1s", "--scenarios=none", "--rounds=0", "--duration=1ns", "--nsq=x", "--only=nobody", "stray", "--srtm=/no --only=srtm"} {
		if c, err := parse(strings.Fields(args), io.Discard); err == nil {
			t.Errorf("%s: %+v, want an error", args, c)
		}
	}
}

func TestScenariosAreSound(t *testing.T) {
	names := map[string]bool{}
	for _, s := range scenarios() {
		if names[s.Name] || s.What == "" || s.Conns < 1 || s.Size < load.TimeSize || s.Channels < 1 || s.Together < 1 || (s.Rate == 0) != (s.Limit > 0 || s.Closed) {
			t.Errorf("%+v", s)
		}
		names[s.Name] = true
	}
}
