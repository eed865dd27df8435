package hook

import (
	"bytes"
	"io"
	"net"
	"runtime"
	"testing"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/stamp"
)

// A client with a raw socket sends segments that TCP drops and the program notes, and later the same bytes so that TCP
// accepts the bytes. No message may be stamped earlier than the accepted bytes.
func TestFilterIsNotForged(t *testing.T) {
	const size = 200
	type attack struct {
		name string
		// forge runs before the message, after runs after it.
		forge, after func(f *testkit.Forger)
		dial         net.Dialer
		early        bool // before the connection has a ring
	}
	old := func(back, n int, flags byte) func(*testkit.Forger) {
		return func(f *testkit.Forger) {
			f.Send(testkit.Forgery{Seq: f.Next - uint32(back), Size: back + n, Flags: flags, Old: true})
		}
	}
	flood := func(segments int) func(*testkit.Forger) {
		return func(f *testkit.Forger) {
			for range segments {
				f.Send(testkit.Forgery{Seq: f.Next + 10*size, Size: size, Old: true})
			}
		}
	}
	programs(t, Config{RingRecords: stamp.MinRing}, func(t *testing.T, s *Stamper, f *filter) {
		ln := listen(t, s, "tcp", "127.0.0.1:0")
		for _, tc := range []attack{
			{name: "old timestamp", forge: old(0, 2*size, 0)},
			{name: "overlap with what was taken", forge: old(size/2, size, 0)},
			{name: "end and urgency", forge: old(0, 2*size, testkit.FIN|testkit.URG|testkit.PSH)},
			{name: "a byte at a time", forge: func(f *testkit.Forger) {
				for i := range uint32(2 * size) {
					f.Send(testkit.Forgery{Seq: f.Next + i, Size: 1, Old: true})
				}
			}},
			{name: "wrong checksum", forge: func(f *testkit.Forger) {
				f.Send(testkit.Forgery{Seq: f.Next, Size: 2 * size, BadSum: true})
			}},
			{name: "reset beside the next byte", forge: func(f *testkit.Forger) {
				f.Send(testkit.Forgery{Seq: f.Next + 1, Size: 2 * size, Flags: testkit.RST})
			}},
			{name: "round the circle", forge: func(f *testkit.Forger) {
				for _, ahead := range []uint32{0, 1<<31 - 10, 1<<32 - 20} {
					f.Send(testkit.Forgery{Seq: f.Next + ahead, Size: 2 * size, Old: true})
				}
			}},
			{name: "sequence numbers wrap within it", forge: old(0, 2*size, 0), dial: startAt(1<<32 - size - size/2)},
			{name: "before there is a ring", forge: old(0, 2*size, 0), early: true},
			{name: "what was taken is overwritten", forge: old(0, 2*size, 0), after: flood(2 * stamp.MinRing)},
			{name: "early, and what was taken is overwritten", forge: old(0, 2*size, 0), after: flood(2 * stamp.MinRing), early: true},
		} {
			t.Run(tc.name, func(t *testing.T) {
				client := dial(t, ln, tc.dial)
				c := s.Track(accept(t, ln))
				defer c.Release()
				client.send(message(size))
				if !tc.early {
					takeOwn(t, c, size) // claims a ring
				}
				forger := testkit.Forge(t, client.TCPConn)
				before := noted(c, f)
				tc.forge(forger)
				if noted(c, f) == before {
					t.Fatal("the program did not note what was forged, so this shows nothing")
				}
				// Wait longer than the clocks may differ.
				for until := clock.Mono().Add(2 * clockSlack); clock.Mono().Before(until); {
					runtime.Gosched()
				}
				from := clock.Mono()
				client.send(message(size))
				client.send(message(size))
				if tc.after != nil {
					tc.after(forger)
				}
				if tc.early {
					takeOwn(t, c, size)
				}
				for i := range 2 {
					start, got := c.Offset(), make([]byte, size)
					testkit.Result(io.ReadFull(c, got)).Must(t)
					if !bytes.Equal(got, message(size)) {
						t.Fatal("TCP took what was forged, so this shows nothing")
					}
					c.last = stamp.Arrival{}
					if a := c.Arrival(start, c.Offset()); a.At.Before(from.Add(-clockSlack)) {
						t.Errorf("message %d: %v, %v before it was written", i, a.Source, from.Sub(a.At))
					}
				}
				if tc.after != nil || f.unbased {
					return // records are lost, or the forged records prevent the search for the base
				}
				// An honest message after the forged segments is stamped exactly again.
				client.send(message(2 * size))
				takeOwn(t, c, 2*size)
				sent := client.send(message(size))
				within(t, "afterwards", takeOwn(t, c, size), stamp.Exact, sent)
			})
		}
	})
}

// noted returns how many segments the program has noted of a connection.
func noted(c *Conn, f *filter) uint64 {
	if cl := c.tr.(*filterConn).claim; cl != nil {
		return cl.ring.Head()
	}
	return f.total()[countEarly]
}

// TCP also accepts bytes after a hole, but the message has arrived only when the hole is filled.
func TestAHoleCounts(t *testing.T) {
	const size = 200
	src, err := openTimestamping(Config{})
	told := stamper(t, src, err)
	whole, _ := loaded(t, false, Config{})
	for _, s := range []*Stamper{whole, told} {
		for range 5 { // a first segment may lack its timestamp
			ln := listen(t, s, "tcp", "127.0.0.1:0")
			client := dial(t, ln, net.Dialer{})
			c := s.Track(accept(t, ln))
			client.send(message(size))
			takeOwn(t, c, size)
			forger := testkit.Forge(t, client.TCPConn)
			forger.Send(testkit.Forgery{Seq: forger.Next + 1, Size: size - 1})
			for until := clock.Mono().Add(2 * trustedAge); clock.Mono().Before(until); {
				runtime.Gosched()
			}
			from := clock.Mono()
			testkit.Result(client.Write(message(1))).Must(t)
			if a := takeOwn(t, c, size); a.At.Before(from.Add(-clockSlack)) {
				t.Errorf("%s: %v, %v before the hole was filled", s.src.name(), a.Source, from.Sub(a.At))
			}
			c.Release()
		}
	}
}
