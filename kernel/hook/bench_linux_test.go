package hook

import (
	"net"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// BenchmarkMessage writes and reads a message on loopback in one goroutine, with each source.
func BenchmarkMessage(b *testing.B) {
	b.Run("off", func(b *testing.B) { benchmarkMessage(b, stamper(b, nil, nil)) })
	b.Run("sotimestamp", func(b *testing.B) {
		src, err := openTimestamping(Config{})
		benchmarkMessage(b, stamper(b, src, err))
	})
	b.Run("ebpf", func(b *testing.B) {
		s, _ := loaded(b, false, Config{})
		benchmarkMessage(b, s)
	})
	b.Run("ebpf, plain", func(b *testing.B) {
		s, _ := loaded(b, true, Config{})
		benchmarkMessage(b, s)
	})
}

func benchmarkMessage(b *testing.B, s *Stamper) {
	ln := listen(b, s, "tcp", "127.0.0.1:0")
	client := dial(b, ln, net.Dialer{})
	c := s.Track(accept(b, ln))
	defer c.Release()
	p, buf := message(100), make([]byte, 200)
	b.ReportAllocs()
	for b.Loop() {
		testkit.Result(client.Write(p)).Must(b)
		start := c.Offset()
		testkit.Result(c.Read(buf)).Must(b)
		c.Arrival(start, c.Offset())
	}
}

// BenchmarkClaim measures the cost of a connection at its first stamp and at its end.
func BenchmarkClaim(b *testing.B) {
	s, f := loaded(b, false, Config{})
	f.slots.quarantine = 0
	ln := listen(b, s, "tcp", "127.0.0.1:0")
	dial(b, ln, net.Dialer{})
	c := s.Track(accept(b, ln))
	tr := c.tr.(*filterConn)
	b.ReportAllocs()
	for b.Loop() {
		cl := testkit.Result(f.claim(tr.rc)).Must(b)
		f.release(cl)
	}
}
