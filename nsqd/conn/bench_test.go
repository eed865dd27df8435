package conn_test

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
	"github.com/srtm-io/srtm/tokenbucket"
)

// BenchmarkPath sends 100-byte messages from publishers' sockets to one subscriber's socket, each acknowledged
// separately. Each publisher has one message (or one pipelined batch) in transit at a time. The benchmark counts
// allocations of the whole process, including the clients, which allocate nothing.
func BenchmarkPath(b *testing.B) {
	for _, c := range []struct {
		publishers, pipeline int
		limited              bool
	}{{10, 1, false}, {10, 1, true}, {4, 100, false}, {4, 100, true}} {
		for loops := range 3 {
			name := fmt.Sprintf("publishers=%d/pipeline=%d/limited=%v/loops=%d", c.publishers, c.pipeline, c.limited, loops)
			b.Run(name, func(b *testing.B) { benchPath(b, c.publishers, c.pipeline, c.limited, loops) })
		}
	}
}

// benched is a broker behind a real listener, for benchmarks and allocation tests.
type benched struct {
	tb      testing.TB
	srv     *conn.Server
	broker  *broker.Broker
	address string
	close   func()
}

func benchNode(tb testing.TB, loops int, limited bool, change ...func(*broker.Config)) *benched {
	tb.Helper()
	check := func(err error) {
		tb.Helper()
		testkit.Must(tb, err)
	}
	log := slog.New(slog.DiscardHandler)
	cfg := broker.Config{Capacity: 100_000, MaxMsgTimeout: time.Minute, AutoCreate: true}
	for _, do := range change {
		do(&cfg)
	}
	br, err := broker.New(cfg)
	check(err)
	stamps, err := hook.Open(hook.Auto, hook.Config{}, log)
	check(err)
	sc := session.DefaultConfig()
	srv, err := conn.New(conn.Config{Session: &sc, WriteTimeout: time.Minute, Loops: loops}, br, stamps, log)
	check(err)
	ctx, cancel := context.WithCancel(context.Background())
	ln, err := srv.Listen(ctx, "127.0.0.1:0")
	check(err)
	var wg sync.WaitGroup
	wg.Go(func() {
		testkit.NoError(tb, srv.Serve(ctx, ln))
	})
	if limited {
		t, err := br.CreateTopic("t")
		check(err)
		t.Contract(tokenbucket.Share{Rate: tokenbucket.PerSecond(1e7), Burst: 1e6}, false)
	}
	return &benched{tb: tb, srv: srv, broker: br, address: ln.Addr().String(), close: func() {
		cancel()
		wg.Wait()
		br.Close()
		stop, cancel := context.WithTimeout(context.Background(), testkit.Hang)
		defer cancel()
		testkit.NoError(tb, srv.Shutdown(stop))
		testkit.NoError(tb, stamps.Close())
	}}
}

func (n *benched) dial() net.Conn {
	n.tb.Helper()
	return testkit.Result(net.Dial("tcp", n.address)).Must(n.tb)
}

// subscriber returns a connection that has subscribed and has read the answer.
func (n *benched) subscriber(channel string) net.Conn {
	n.tb.Helper()
	sub := n.dial()
	testkit.Result(sub.Write(wire.AppendRdy(wire.AppendSub(wire.AppendMagic(nil), "t", channel), 2500))).Must(n.tb)
	testkit.Result(io.ReadFull(sub, make([]byte, wire.FrameOverhead+len(wire.OK)))).Must(n.tb)
	n.tb.Cleanup(func() { sub.Close() })
	return sub
}

func benchPath(b *testing.B, publishers, pipeline int, limited bool, loops int) {
	node := benchNode(b, loops, limited)
	sub := node.subscriber("c")
	r := bufio.NewReaderSize(sub, 64<<10)
	var wg sync.WaitGroup
	rounds := max(1, b.N/(publishers*pipeline))
	total := rounds * publishers * pipeline
	b.ReportAllocs()
	b.ResetTimer()
	for range publishers {
		nc := node.dial()
		wg.Go(func() {
			defer nc.Close()
			var out []byte
			for range pipeline {
				out = wire.AppendPub(out, "t", make([]byte, 100))
			}
			if _, err := nc.Write(wire.AppendMagic(nil)); err != nil {
				b.Error(err)
				return
			}
			replies := make([]byte, pipeline*10)
			for range rounds {
				if _, err := nc.Write(out); err != nil {
					b.Error(err)
					return
				}
				if _, err := io.ReadFull(nc, replies); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	var fin []byte
	for n := 0; n < total; n++ {
		head := testkit.Result(r.Peek(wire.MessageOverhead)).Must(b)
		fin = wire.AppendFin(fin, wire.MessageID(head[18:34]))
		testkit.Result(r.Discard(4 + int(binary.BigEndian.Uint32(head)))).Must(b)
		if r.Buffered() == 0 {
			testkit.Result(sub.Write(fin)).Must(b)
			fin = fin[:0]
		}
	}
	b.StopTimer()
	b.ReportMetric(float64(total)/b.Elapsed().Seconds(), "msg/s")
	wg.Wait()
	node.close()
}
