//go:build !race

package conn_test

import (
	"bufio"
	"fmt"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
)

// In steady traffic a message takes no heap allocation from the publisher's socket to its subscribers' sockets and back
// to FIN, with rate limiting, capture of arrivals and the best stamps available. The test permits one allocation for a
// hundred deliveries, because the runtime has its own goroutines and timers. A subscriber with its own goroutine frees
// the memory of each large write instead of keeping the memory as long as the subscriber exists: one allocation for each
// message.
func TestAllocationsOverSockets(t *testing.T) {
	for _, c := range []struct {
		size, channels int // bytes of a message
		together       int // messages in one write
		batch          bool
	}{
		{size: 100, channels: 1, together: 1},
		{size: 100, channels: 1, together: 50},
		{size: 100, channels: 4, together: 1},
		{size: 100, channels: 16, together: 1},
		{size: 100, channels: 16, together: 20},
		{size: 100, channels: 1, together: 200, batch: true},
		{size: 64 << 10, channels: 1, together: 1}, // more than one read of a loop takes
		{size: 64 << 10, channels: 4, together: 3},
	} {
		for loops := range 3 {
			name := fmt.Sprintf("size=%d/channels=%d/together=%d/loops=%d", c.size, c.channels, c.together, loops)
			if c.batch {
				name = "mpub/" + name
			}
			t.Run(name, func(t *testing.T) {
				b := benchNode(t, loops, true)
				defer b.close()
				// The capture's record doubles a few times until the record holds all messages.
				if !b.broker.Node().Capture("t") {
					t.Fatal("not captured")
				}
				p := pipe{t: t, size: c.size, pub: b.dial()}
				defer p.close() // before the node, which would wait for the clients
				for i := range c.channels {
					sub := b.subscriber(fmt.Sprint("c", i))
					p.subs = append(p.subs, sub)
					p.readers = append(p.readers, bufio.NewReaderSize(sub, 1<<17))
				}
				p.prepare(c.together, c.batch)
				// The limit exceeds the messages that can be in transit: unread FINs for the RDY of 2,500, and one
				// waiting batch.
				messages, most := 3_000, 2_800
				if c.size > 1000 {
					messages, most = 1_000, 300
				}
				deliveries := messages * c.channels
				allowed := 50 + deliveries/100
				if loops == 0 && c.size > 16<<10 {
					allowed += 2 * deliveries
				}
				for range most / c.together {
					p.publish()
				}
				for range most / c.together {
					p.finish()
				}
				for range most / c.together {
					p.publish()
					p.finish()
				}
				// A processor that has not run this traffic yet fills its pools first, so one round may have more
				// allocations than the next. An allocation per message appears in every round.
				var rounds []uint64
				for range 5 {
					var before, after runtime.MemStats
					runtime.ReadMemStats(&before)
					for range messages / c.together {
						p.publish()
						p.finish()
					}
					runtime.ReadMemStats(&after)
					n := after.Mallocs - before.Mallocs
					if n <= uint64(allowed) {
						return
					}
					rounds = append(rounds, n)
				}
				t.Errorf("%d allocations for %d messages in each round, allowed are %d", rounds, messages, allowed)
			})
		}
	}
}

// One goroutine carries out all publishes that wait for the same fsync. A publish does not start its own goroutine.
func TestAllocationsOfDurablePublishes(t *testing.T) {
	const publishers, rounds = 64, 50
	path := t.TempDir()
	st, err := broker.OpenStorage(broker.StorageConfig{Path: path, Metadata: filepath.Join(path, "topics.json"), MaxRecord: 1 << 20, Overflow: 20, WriteThrough: true, Fsync: true, Log: slog.New(slog.DiscardHandler)})
	testkit.Must(t, err)
	defer func() {
		testkit.NoError(t, st.Close())
	}()
	b := benchNode(t, 1, true, func(c *broker.Config) { c.Storage = st })
	defer b.close()
	pipes := make([]pipe, publishers)
	for i := range pipes {
		pipes[i] = pipe{t: t, size: 100, pub: b.dial()}
		defer pipes[i].close()
		pipes[i].prepare(1, false)
	}
	all := func() {
		for i := range pipes {
			testkit.Result(pipes[i].pub.Write(pipes[i].pubs)).Must(t)
		}
		for i := range pipes {
			testkit.Result(io.ReadFull(pipes[i].pub, pipes[i].answers)).Must(t)
		}
	}
	all()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range rounds {
		all()
	}
	runtime.ReadMemStats(&after)
	if n := after.Mallocs - before.Mallocs; n > 4*publishers*rounds {
		t.Errorf("%d allocations for %d messages, allowed are 4 for each", n, publishers*rounds)
	} else {
		t.Logf("%d allocations for %d messages", n, publishers*rounds)
	}
}

// pipe is a publisher and its subscribers. After their preparation they allocate nothing.
type pipe struct {
	t       *testing.T
	size    int
	pub     net.Conn
	subs    []net.Conn
	readers []*bufio.Reader

	together             int
	pubs, answers, frame []byte
	fins                 []byte
}

func (p *pipe) prepare(together int, batch bool) {
	testkit.Result(p.pub.Write(wire.AppendMagic(nil))).Must(p.t)
	p.together = together
	answers := together
	body := make([]byte, p.size)
	if batch {
		answers = 1
		var bodies [][]byte
		for range together {
			bodies = append(bodies, body)
		}
		p.pubs = wire.AppendMpub(nil, "t", bodies)
	} else {
		for range together {
			p.pubs = wire.AppendPub(p.pubs, "t", body)
		}
	}
	p.answers = make([]byte, answers*(wire.FrameOverhead+len(wire.OK)))
	p.frame = make([]byte, wire.MessageFrameSize(p.size))
}

func (p *pipe) close() {
	for _, c := range append(p.subs, p.pub) {
		c.Close()
	}
}

func (p *pipe) publish() {
	testkit.Result(p.pub.Write(p.pubs)).Must(p.t)
	testkit.Result(io.ReadFull(p.pub, p.answers)).Must(p.t)
}

func (p *pipe) finish() {
	for i, sub := range p.subs {
		p.fins = p.fins[:0]
		for range p.together {
			testkit.Result(io.ReadFull(p.readers[i], p.frame)).Must(p.t)
			p.fins = wire.AppendFin(p.fins, wire.MessageID(p.frame[18:34]))
		}
		testkit.Result(sub.Write(p.fins)).Must(p.t)
	}
}
