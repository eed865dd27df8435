package main

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/srtm-io/srtm/client/fake"
	"github.com/srtm-io/srtm/internal/testkit"
)

// Publishers request their pace with their weights, and send.
func TestGreedyPublishers(t *testing.T) {
	log := &fake.Log{}
	b := testkit.Result(fake.NewBroker("b", log)).Must(t)
	defer b.Close()
	b.Paces()
	out, err := command(t, "greedy", "--nsqd-tcp-address="+b.Address(), "--publishers=3", "--weight=2,0", "--warm-up=0s", "--duration=200ms", "--output=json")
	testkit.Must(t, err)
	var rep greedyReport
	testkit.Must(t, json.Unmarshal([]byte(out), &rep))
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
		testkit.ErrorHas(t, err, want)
	}
}

// A message has the requested size, even if the message is too small for its send time.
func TestGreedySizes(t *testing.T) {
	for _, size := range []int{1, 23, 24, 100} {
		log := &fake.Log{}
		b := testkit.Result(fake.NewBroker("b", log)).Must(t)
		defer b.Close()
		_, err := command(t, "greedy", "--nsqd-tcp-address="+b.Address(), "--publishers=1", "--weight=0", "--warm-up=0s", "--duration=50ms", fmt.Sprint("--size=", size))
		testkit.Must(t, err)
		sent := 0
		for _, e := range log.Events() {
			if e.Kind != fake.Pub {
				continue
			}
			if sent++; len(e.Bodies[0]) != size {
				t.Fatalf("%d bytes, want %d", len(e.Bodies[0]), size)
			}
		}
		if sent == 0 {
			t.Error("nothing was sent")
		}
	}
}
