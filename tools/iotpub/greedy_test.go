package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/client/fake"
)

// Publishers ask for their pace, with their weights, and send.
func TestGreedyPublishers(t *testing.T) {
	log := &fake.Log{}
	b, err := fake.NewBroker("b", log)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	b.Paces()
	out, err := command(t, "greedy", "--nsqd-tcp-address="+b.Address(), "--publishers=3", "--weight=2,0", "--warm-up=0s", "--duration=200ms", "--output=json")
	if err != nil {
		t.Fatal(err)
	}
	var rep greedyReport
	if err := json.Unmarshal([]byte(out), &rep); err != nil {
		t.Fatal(err)
	}
	if rep.Accepted <= 0 || rep.Refused != 0 || len(rep.Weights) != 2 || rep.Weights[0].Weight != 2 || rep.Weights[0].Publishers != 2 || rep.Weights[1].Publishers != 1 {
		t.Errorf("%+v", rep)
	}
	asked := map[string]bool{}
	for _, e := range log.Events() {
		if e.Kind == fake.Pace {
			asked[e.Client] = true
		}
	}
	if len(asked) != 2 || !asked["greedy.0"] || !asked["greedy.2"] {
		t.Errorf("%v asked for their pace", asked)
	}
	_, err = command(t, "greedy", "--weight=300", "--publishers=0", "--output=xml")
	for _, want := range []string{"weight: 300", "publishers: 0", `output "xml"`, "want either the address"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}
