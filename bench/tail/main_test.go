//go:build linux

package main

import (
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tools/load"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// The broker's thread is woken at 2 while another program runs, runs from 4 to 5, is
// interrupted until 6 and runs until 7; then the load's.
const trace = `
 0.000002000: sched:sched_wakeup: comm=nsqd-traced pid=11 prio=120 target_cpu=000
 0.000004000: sched:sched_switch: prev_comm=other prev_pid=9 prev_prio=120 prev_state=R ==> next_comm=nsqd-traced next_pid=11 next_prio=120
 0.000005000: sched:sched_switch: prev_comm=nsqd-traced prev_pid=11 prev_prio=120 prev_state=R+ ==> next_comm=other next_pid=9 next_prio=120
 0.000006000: sched:sched_switch: prev_comm=other prev_pid=9 prev_prio=120 prev_state=R ==> next_comm=nsqd-traced next_pid=11 next_prio=120
 0.000006500: sched:sched_wakeup: comm=tail pid=12 prio=110 target_cpu=000
 0.000007000: sched:sched_switch: prev_comm=nsqd-traced prev_pid=11 prev_prio=120 prev_state=S ==> next_comm=other next_pid=9 next_prio=120
 0.000008000: sched:sched_switch: prev_comm=other prev_pid=9 prev_prio=120 prev_state=R ==> next_comm=tail next_pid=12 next_prio=110
 0.000009000: sched:sched_switch: prev_comm=tail prev_pid=12 prev_prio=110 prev_state=S ==> next_comm=other next_pid=9 next_prio=120
`

func TestTheSchedulersEventsAreFollowed(t *testing.T) {
	spans, err := read(strings.NewReader(strings.TrimLeft(trace, "\n")))
	testkit.Must(t, err)
	want := []span{{2000, starved}, {4000, turn}, {5000, starved}, {6000, turn}, {7000, waiting}, {8000, received}, {9000, neither}}
	if len(spans) != len(want) {
		t.Fatalf("%v, want %v", spans, want)
	}
	for i, s := range spans {
		if s.cause != want[i].cause || max(s.from.Sub(want[i].from), want[i].from.Sub(s.from)) > 1 {
			t.Errorf("%v, want %v", s, want[i])
		}
	}
	var table strings.Builder
	write(&table, load.Result{Slowest: []load.Delivery{{Due: mono.Time(1500), Sent: mono.Time(2000), Delivered: mono.Time(10_000)}}}, spans,
		[]collection{{from: 2500, to: 4500, stopped: 100}, {from: 20_000, to: 30_000, stopped: 100}})
	for i, row := range []string{"| 0.001 | 6 | 0 |", "| 0.002 | 24 | 0 |", "| 0.003 | 35 | 1 |", "| 0.001 | 12 | 0 |", "| 0.001 | 12 | 0 |", "| 0.001 | 12 | 0 |"} {
		if lines := strings.Split(table.String(), "\n"); !strings.Contains(lines[2+i], row) {
			t.Errorf("%s: want %s", lines[2+i], row)
		}
	}
	if want := "collected 1 times meanwhile"; !strings.Contains(table.String(), want) || !strings.Contains(table.String(), "1 of these deliveries were under way meanwhile, for 24 %") {
		t.Errorf("%s\nwant %s", table.String(), want)
	}
	if _, err := read(strings.NewReader("perf says something else\n")); err == nil {
		t.Error("no error for what is no trace")
	}
}

func TestTheRuntimesLinesAreRead(t *testing.T) {
	c, ok := parseCollection("gc 1 @0.038s 0%: 0.5+1.25+0.25 ms clock, 0.054+0.35/1.2/3.0+0.23 ms cpu, 4->4->0 MB, 5 MB goal, 0 MB stacks, 0 MB globals, 2 P", 3e6)
	if want := (collection{from: 1e6, to: 3e6, stopped: 750e3}); !ok || c != want {
		t.Errorf("%+v, %v, want %+v", c, ok, want)
	}
	for _, line := range []string{"", "nsqd: gc", "gc 1 @0.038s 0%: 0.5+1.25 ms clock", "gc 1 @0.038s 0%: a+b+c ms clock"} {
		if c, ok := parseCollection(line, 3e6); ok {
			t.Errorf("%q: %+v", line, c)
		}
	}
}
