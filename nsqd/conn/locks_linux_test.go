//go:build !race

package conn_test

import (
	"fmt"
	"io"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
)

// Busy topics do not contend for a common lock. While messages go through several topics on several loops, goroutines
// wait only for a topic's own locks, or for the lock of a loop's inbox, which gets a topic's subscriber at most once a
// turn.
func TestBusyTopicsMeetOnNoLock(t *testing.T) {
	const rounds = 300
	n := benchNode(t, 2, false, func(c *broker.Config) { c.Capacity = 4 * 2 * rounds * pipeline })
	defer n.close()

	waited := waitedFor(n.traffic(t, 4, 1), rounds)
	for function := range waited {
		if !ofTopic(function) && !ofInbox(function) {
			t.Errorf("%s gave back a lock that others waited for: %v", function, waited)
		}
	}

	// The test detects contention: one topic's publishers, on both loops, contend for the topic's lock.
	one := n.traffic(t, 1, 4)
	for range 20 {
		for function := range waitedFor(one, rounds) {
			if ofTopic(function) {
				return
			}
		}
	}
	t.Error("no loop waited for the lock of a topic with publishers on two loops")
}

// ofInbox reports whether the function uses the lock of a loop's inbox.
func ofInbox(function string) bool { return strings.HasPrefix(function, "nsqd/conn.(*inbox).") }

// ofTopic reports whether the function uses a lock that belongs to a single topic.
func ofTopic(function string) bool {
	return slices.ContainsFunc([]string{"Topic", "runner", "intake", "metrics"}, func(of string) bool {
		return strings.HasPrefix(function, "nsqd/broker.(*"+of+").")
	})
}

// pipeline is how many messages a publisher sends before reading the answers.
const pipeline = 100

// traffic connects so many publishers to each topic, and one subscriber. The returned function sends and receives so
// many rounds.
func (n *benched) traffic(t *testing.T, topics, publishers int) func(rounds int) {
	t.Helper()
	const body = 100
	var all []func(rounds int) error
	dial := func(hello []byte) net.Conn {
		nc := n.dial()
		t.Cleanup(func() { nc.Close() })
		testkit.Result(nc.Write(hello)).Must(t)
		return nc
	}
	for i := range topics {
		topic := fmt.Sprintf("of%d-%d", topics, i)
		sub := dial(wire.AppendRdy(wire.AppendSub(wire.AppendMagic(nil), topic, "c"), 2500))
		_, err := io.ReadFull(sub, make([]byte, wire.FrameOverhead+len(wire.OK)))
		testkit.Must(t, err)
		all = append(all, func(rounds int) error {
			message := make([]byte, wire.MessageOverhead+body)
			for range rounds * publishers * pipeline {
				if _, err := io.ReadFull(sub, message); err != nil {
					return err
				}
				if _, err := sub.Write(wire.AppendFin(nil, wire.MessageID(message[18:34]))); err != nil {
					return err
				}
			}
			return nil
		})
		var batch []byte
		for range pipeline {
			batch = wire.AppendPub(batch, topic, make([]byte, body))
		}
		for range publishers {
			pub := dial(wire.AppendMagic(nil))
			all = append(all, func(rounds int) error {
				replies := make([]byte, pipeline*(wire.FrameOverhead+len(wire.OK)))
				for range rounds {
					if _, err := pub.Write(batch); err != nil {
						return err
					}
					if _, err := io.ReadFull(pub, replies); err != nil {
						return err
					}
				}
				return nil
			})
		}
	}
	run := func(rounds int) {
		var wg sync.WaitGroup
		for _, do := range all {
			wg.Go(func() {
				testkit.NoError(t, do(rounds))
			})
		}
		wg.Wait()
	}
	run(1) // completes the work that happens only once
	return run
}

// waitedFor calls run and returns how often each of our functions released a lock that a loop had waited for.
func waitedFor(run func(rounds int), rounds int) map[string]int64 {
	defer runtime.SetMutexProfileFraction(runtime.SetMutexProfileFraction(1))
	before := contention()
	run(rounds)
	waited := contention()
	for function, n := range before {
		if waited[function] -= n; waited[function] == 0 {
			delete(waited, function)
		}
	}
	return waited
}

// contention returns the profile of sync's mutexes by the function that called Unlock.
func contention() map[string]int64 {
	records := make([]runtime.BlockProfileRecord, 10_000)
	n, _ := runtime.MutexProfile(records)
	waited := map[string]int64{}
	for _, r := range records[:n] {
		frames := runtime.CallersFrames(r.Stack())
		f, more := frames.Next()
		if !strings.HasPrefix(f.Function, "sync.") {
			continue // the runtime's own
		}
		for more {
			f, more = frames.Next()
			if strings.HasPrefix(f.Function, "sync.(*Pool).") {
				break // the pool's own lock, when a processor first uses the pool
			}
			if function, ours := strings.CutPrefix(f.Function, "github.com/srtm-io/srtm/"); ours {
				waited[function] += r.Count
				break
			}
		}
	}
	return waited
}
