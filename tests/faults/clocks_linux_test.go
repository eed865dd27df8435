package faults

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
	"github.com/srtm-io/srtm/tokenbucket"
)

// clocks is a set of machines that differ in their clocks alone.
type clocks struct {
	loopback
	dir string // of the scripts
	of  map[string]*localtest.Clock
}

// program writes a script that runs the program with the machine's clock.
func (m clocks) program(machine, pkg string) string {
	m.t.Helper()
	path, more := filepath.Join(m.dir, machine), ""
	if pkg == "nsqd" {
		more = "--arrival-stamps=off"
	}
	script := fmt.Sprintf("#!/bin/sh\n%s exec %s \"$@\" %s\n", m.of[machine].Env(), localtest.WithClock(m.t, pkg), more)
	testkit.Must(m.t, os.WriteFile(path, []byte(script), 0o700))
	return path
}

func (m clocks) real(machine string, reading mono.Time) mono.Time { return m.of[machine].Real(reading) }

// faster returns the promises of clocks that are too fast by a fraction: a broker counts its rate by
// its own clock. The times of messages are rounded to ns, so a bucket that was empty twice may seem to
// have had a millionth of a token too little. The rates are therefore higher by 0.001 msg/s.
func (p promises) faster(by float64) (all promises) {
	more := func(s tokenbucket.Share) tokenbucket.Share {
		return tokenbucket.Share{Rate: tokenbucket.Rate(float64(s.Rate)*(1+by)) + 1, Burst: s.Burst}
	}
	for _, one := range p {
		one.contract, one.former = more(one.contract), maps.Clone(one.former)
		for id, f := range one.former {
			one.former[id] = former{more(f.share), f.until}
		}
		all = append(all, one)
	}
	return all
}

// works changes the contract and changes it back, and checks that messages flow and that all processes
// are healthy.
func (c *cluster) works(a *administration, after string) {
	t := c.t
	t.Helper()
	lower, restored := tokenbucket.Share{Rate: rate / 2 * 1000, Burst: burst / 2}, fixed()[0].contract
	for _, contract := range []tokenbucket.Share{lower, restored} {
		testkit.WaitFor(t, after+": the contract is changed", func() bool { return a.update(contract) == nil })
		testkit.WaitFor(t, after+": the brokers hold the contract", func() bool { return restoredTo(c.shares(), contract) })
	}
	a.until(after+": no broker may use more", func(former map[string]former) bool { return len(former) == 0 })
	c.flows(rate / 5)
	for name, web := range c.webs() {
		if text := health(web); !strings.HasPrefix(text, "200 ") {
			t.Errorf("%s: health of %s: %s", after, name, text)
		}
	}
}

// Machines have clocks that are 1 % too fast or too slow. Their CLOCK_REALTIME is stepped by minutes
// while the processes run, and set back before the processes restart. No accepted message is lost, a
// contract is exceeded by at most 1 %, and all processes stay healthy.
func TestWrongClocksLoseNoMessage(t *testing.T) {
	for name, apart := range map[string]bool{"embedded": false, "daemon": true} {
		t.Run(name, func(t *testing.T) {
			if !apart && os.Getenv(longer) == "" {
				t.Skip("make faults runs it")
			}
			rng := testkit.Rand(t)
			m := clocks{loopback{t}, t.TempDir(), map[string]*localtest.Clock{}}
			for machine, fast := range map[string]int64{"control": 10_000, "adaptor": 10_000, "b0": 10_000, "b1": -10_000, "b2": 0} {
				m.of[machine] = localtest.NewClock(t, fast)
			}
			c := &cluster{t: t, dir: t.TempDir(), leases: shortLeases, apart: apart, placement: "loadbalance", mcap: rate + 100, machines: m, real: m.real}
			c.wall = func() time.Time { return time.Now().Add(m.of["control"].Stepped()) }
			c.store, c.durable = []string{"--data-path=" + c.dir}, []string{"--durability=fsync"}
			c.start([]string{"available", "strict", "available"})
			a, stop := c.beginWith(rate * 6 / 5)
			for _, by := range []time.Duration{5 * time.Minute, -10 * time.Minute} {
				for _, machine := range shuffled(rng, slices.Sorted(maps.Keys(c.processes()))) {
					m.of[machine].Step(by)
					c.works(a, fmt.Sprintf("clock of %s stepped by %v", machine, by))
				}
			}
			for machine, web := range c.webs() {
				if off := dateOf(t, web).Sub(time.Now().Add(m.of[machine].Stepped())).Abs(); off > time.Minute {
					t.Fatalf("%s has a clock that is %v off its machine's clock", machine, off)
				}
			}
			restart := map[string]func(){"control": func() { c.must(c.control.Kill()); c.startControl() }}
			if apart {
				restart["adaptor"] = func() { c.must(c.adaptor.Kill()); c.startAdaptor() }
			}
			for _, b := range c.brokers {
				restart[b.name] = func() { c.must(b.process.Kill()); c.startBroker(b) }
			}
			for _, machine := range shuffled(rng, slices.Sorted(maps.Keys(restart))) {
				m.of[machine].Step(-time.Hour)
				restart[machine]()
				c.works(a, machine+" restarted after its clock was set back")
			}
			// The strict broker's clock is slow, and its lease's clock is fast.
			link := c.brokers[1].proxy
			if apart {
				link = c.link
			}
			link.Cut(true)
			testkit.WaitFor(t, "the lowered contract", func() bool {
				return apart || a.update(tokenbucket.Share{Rate: rate / 2 * 1000, Burst: burst / 2}) == nil
			})
			wait(3 * time.Second) // sessions last 2 s
			a.look()
			link.Cut(false)
			c.works(a, "the broker with the slow clock is back")
			c.settle(stop, a.promises.faster(0.01))
		})
	}
}

// dateOf returns the wall clock of a process.
func dateOf(t *testing.T, web string) time.Time {
	t.Helper()
	r, err := http.Get("http://" + web + "/ping")
	testkit.Must(t, err)
	r.Body.Close()
	http.DefaultClient.CloseIdleConnections()
	return testkit.Result(http.ParseTime(r.Header.Get("Date"))).Must(t)
}

func shuffled(rng *rand.Rand, all []string) []string {
	rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all
}
