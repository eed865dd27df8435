//go:build !race

package conn_test

import (
	"bufio"
	"fmt"
	"io"
	"runtime"
	"testing"

	"github.com/srtm-io/srtm/nsqd/wire"
)

// From a publisher's socket to a subscriber's and back to FIN a message in
// steady traffic takes no heap allocation, with rate limiting, its arrival
// captured, and with the best stamps there are. One for a hundred messages is left to what comes with time:
// the runtime has goroutines and timers of its own.
func TestAllocationsOverSockets(t *testing.T) {
	for n := range 3 {
		for _, pipeline := range []int{1, 50} {
			t.Run(fmt.Sprintf("loops=%d/pipeline=%d", n, pipeline), func(t *testing.T) {
				b := benchNode(t, n, true)
				defer b.close()
				sub, pub := b.subscriber(), b.dial()
				defer pub.Close()
				// The record doubles a few times on its way to all messages.
				if !b.broker.Node().Capture("t") {
					t.Fatal("not captured")
				}
				if _, err := pub.Write(wire.AppendMagic(nil)); err != nil {
					t.Fatal(err)
				}
				var pubs, fins []byte
				for range pipeline {
					pubs = wire.AppendPub(pubs, "t", make([]byte, 100))
				}
				answers := make([]byte, pipeline*(wire.FrameOverhead+len(wire.OK)))
				frame := make([]byte, wire.MessageFrameSize(100))
				r := bufio.NewReaderSize(sub, 1<<20)
				publish := func() {
					if _, err := pub.Write(pubs); err != nil {
						t.Fatal(err)
					}
					if _, err := io.ReadFull(pub, answers); err != nil {
						t.Fatal(err)
					}
				}
				finish := func() {
					fins = fins[:0]
					for range pipeline {
						if _, err := io.ReadFull(r, frame); err != nil {
							t.Fatal(err)
						}
						fins = wire.AppendFin(fins, wire.MessageID(frame[18:34]))
					}
					if _, err := sub.Write(fins); err != nil {
						t.Fatal(err)
					}
				}
				// More than can ever be on the way: FINs may pile up unread, but no
				// more than the RDY of 2,500.
				const messages, most = 20_000, 5_000
				for range most / pipeline {
					publish()
				}
				for range most / pipeline {
					finish()
				}
				var before, after runtime.MemStats
				runtime.ReadMemStats(&before)
				for range messages / pipeline {
					publish()
					finish()
				}
				runtime.ReadMemStats(&after)
				if n := after.Mallocs - before.Mallocs; n > messages/100 {
					t.Errorf("%d allocations for %d messages", n, messages)
				}
				if n := len(b.broker.Node().Arrivals("t").GetGapNs()); n != most+messages {
					t.Errorf("%d messages captured, want %d", n, most+messages)
				}
			})
		}
	}
}
