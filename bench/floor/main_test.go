//go:build linux

package main

import (
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tools/load"
)

const asProgram = "SRTM_TEST_FLOOR"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		return
	}
	testkit.Main(m)
}

func TestTheFloorDeliversEverything(t *testing.T) {
	t.Setenv(asProgram, "1")
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(load.Procs()))
	for _, s := range []load.Scenario{
		{Name: "rate", Conns: 20, Rate: 2000, Size: 100, Channels: 2, Together: 2},
		{Name: "batches", Conns: 2, Size: 100, Channels: 1, Together: 10, Batch: true, Limit: 5000},
		{Name: "fsync", Conns: 3, Size: 100, Channels: 1, Together: 1, Closed: true, Fsync: true},
		{Name: "storm", Conns: 3, Rate: 500, Size: 100, Channels: 1, Together: 1, Storm: 200},
	} {
		r, err := load.Perform(t.Context(), load.Floor(os.Args[0]), s, 200*time.Millisecond, testkit.Seed(t))
		if err != nil || r.Sent == 0 || r.Accepted != r.Sent || r.Missing != 0 {
			t.Errorf("%s: %v, %+v", s.Name, err, r)
		}
	}
	for _, s := range []load.Scenario{
		{Name: "rate", Conns: 20, Rate: 2000, Size: 100, Channels: 2, Together: 2},
		{Name: "flood", Conns: 2, Size: 100, Channels: 1, Together: 10, Limit: 5000},
	} {
		r, err := load.Perform(t.Context(), load.FloorMQTT(os.Args[0]), s, 200*time.Millisecond, testkit.Seed(t))
		if err != nil || r.Sent == 0 || r.Accepted != r.Sent || r.Missing != 0 {
			t.Errorf("MQTT, %s: %v, %+v", s.Name, err, r)
		}
	}
}
