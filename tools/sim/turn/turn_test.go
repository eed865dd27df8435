package turn_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tools/sim/turn"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const us = time.Microsecond

// measured are the medians of nsqd under poisson-4000 of bench/peer. The load's costs follow from
// the load's processor time per message under poisson-1000 and poisson-4000.
var measured = turn.Costs{
	Wake: 5 * us, Wait: 4 * us, Read: 7500, Message: 500, Reply: 9 * us, Deliver: 14 * us, Encode: 1 * us, FINs: 4500, Finish: 100, Post: 2 * us,
	Send: 13 * us, Receive: 10 * us, Acknowledge: 22 * us, Received: 400,
}

// capacity is the rate at which a loop fills a processor of its own, with 64 connections a turn.
const capacity = 55_700

// today is the turn of nsqd/conn.
var today = turn.Turn{Events: 64, Commands: 256}

func config(t turn.Turn, rate float64) turn.Config {
	c := turn.Config{Costs: measured, Turn: t, Processors: 2, Loops: 1, Connections: int(rate / 10), Rate: rate, Duration: 500 * time.Millisecond}
	if rate > 30_000 {
		c.Pause = 50 * us // as the sender of tools/load
	}
	return c
}

func run(c turn.Config) turn.Result { return turn.Run(c, rand.New(rand.NewPCG(1, 0))) }

// candidates returns today's turn and changes of it.
func candidates() (names []string, turns []turn.Turn) {
	add := func(name string, change func(*turn.Turn)) {
		t := today
		change(&t)
		names, turns = append(names, name), append(turns, t)
	}
	first := func(also func(*turn.Turn)) func(*turn.Turn) {
		return func(t *turn.Turn) { t.Order = turn.First; also(t) }
	}
	add("deliveries last", func(*turn.Turn) {})
	add("reply after each read", func(t *turn.Turn) { t.Order = turn.Merged })
	add("last, 16 events", func(t *turn.Turn) { t.Events = 16 })
	add("deliveries first", first(func(*turn.Turn) {}))
	for _, long := range []int{8, 16, 32} {
		add(fmt.Sprintf("first if %d replies", long), first(func(t *turn.Turn) { t.Long = long }))
	}
	add("first, FINs read first", first(func(t *turn.Turn) { t.Finish = true }))
	add("first, 16 events", first(func(t *turn.Turn) { t.Events = 16 }))
	add("first, 256 events", first(func(t *turn.Turn) { t.Events = 256 }))
	add("first, also after 8 reads", first(func(t *turn.Turn) { t.Early = 8 }))
	add("first, also after 32 reads", first(func(t *turn.Turn) { t.Early = 32 }))
	add("first, 2 commands a read", first(func(t *turn.Turn) { t.Commands = 2 }))
	add("first, 16 replies, 128 owed", first(func(t *turn.Turn) { t.Replies, t.Owed = 16, 128 }))
	return names, turns
}

// situations are the loads of the table.
func situations() (names []string, changes []func(turn.Turn) turn.Config) {
	add := func(name string, f func(turn.Turn) turn.Config) {
		names, changes = append(names, name), append(changes, f)
	}
	for _, rate := range []float64{10_000, 20_000, 40_000, 47_000, 50_000, 53_000} {
		add(fmt.Sprintf("%.0f messages/s, load %.2f", rate, rate/capacity), func(t turn.Turn) turn.Config { return config(t, rate) })
	}
	add("40000 messages/s, all threads stop for 2 ms every 100 ms", func(t turn.Turn) turn.Config {
		c := config(t, 40_000)
		c.Stall, c.StallEvery = 2*time.Millisecond, 100*time.Millisecond
		return c
	})
	add("20000 messages/s, 500 publishers at one instant", func(t turn.Turn) turn.Config {
		c := config(t, 20_000)
		c.Storm = 500
		return c
	})
	add("20000 messages/s, frames of 10", func(t turn.Turn) turn.Config {
		c := config(t, 20_000)
		c.Together = 10
		return c
	})
	for _, publishers := range []int{10, 100} {
		add(fmt.Sprintf("%d publishers that wait for their replies", publishers), func(t turn.Turn) turn.Config {
			c := config(t, 1)
			c.Closed, c.Connections = true, publishers
			return c
		})
	}
	add("40000 messages/s, two loops", func(t turn.Turn) turn.Config {
		c := config(t, 40_000)
		c.Loops = 2
		return c
	})
	add("15000 messages/s, one processor", func(t turn.Turn) turn.Config {
		c := config(t, 15_000)
		c.Processors = 1
		return c
	})
	return names, changes
}

func TestTable(t *testing.T) {
	var table bytes.Buffer
	turns, candidates := candidates()
	loads, configs := situations()
	for i, load := range loads {
		fmt.Fprintf(&table, "%s\n%-28s %8s %8s %8s | %8s %8s | %5s %5s %6s\n", load, "", "p50", "p99", "p99.9", "OK p50", "OK p99", "reads", "busy", "OK/s")
		for j, name := range turns {
			r := run(configs[i](candidates[j]))
			d, o := r.Delivered, r.Replied
			fmt.Fprintf(&table, "%-28s %8d %8d %8d | %8d %8d | %5.1f %5.2f %6.0f\n", name, d[0]/us, d[1]/us, d[2]/us, o[0]/us, o[1]/us, r.Reads, r.Busy, r.Rate)
		}
		fmt.Fprintln(&table)
	}
	testkit.Golden(t, filepath.Join("testdata", "turns.txt"), table.Bytes())
}

func TestAllMessagesAreDeliveredAndAnswered(t *testing.T) {
	_, turns := candidates()
	_, configs := situations()
	for _, f := range configs {
		c := f(today)
		c.Duration /= 10
		want := run(c)
		for _, candidate := range turns {
			c.Turn = candidate
			r := run(c)
			testkit.Equal(t, r, run(c), "result of the same seed, %+v", candidate)
			testkit.Equal(t, r.Messages, r.Answers, "messages, of the answers of %+v", candidate)
			if !c.Closed {
				testkit.Equal(t, r.Messages, want.Messages, "messages of the schedule, %+v", candidate)
			}
		}
	}
}

// An idle broker delivers a message after the steps between the sender and the subscriber.
func TestLatencyOfAMessageAlone(t *testing.T) {
	for order, want := range map[turn.Order]time.Duration{
		turn.First: measured.Read, turn.Last: measured.Read + measured.Reply, turn.Merged: measured.Read + measured.Reply,
	} {
		c := config(turn.Turn{Order: order, Events: 64, Commands: 256}, 10)
		c.Connections, c.Duration = 1, 10*time.Second
		want += measured.Wake + measured.Send + measured.Wake + measured.Wait + measured.Deliver + measured.Encode + measured.Wake + measured.Receive
		got := run(c).Delivered[0]
		if off := got - want; off < 0 || off > 100 {
			t.Errorf("order %d: p50 %v, want %v and at most 100ns of rounding", order, got, want)
		}
	}
}
