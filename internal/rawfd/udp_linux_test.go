package rawfd

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
)

// Datagrams that arrive while nothing receives are received later, and together if they arrived
// closely. Each datagram has its sender, and the sender gets the answers that are queued for the
// sender. A full queue is sent. Nothing is allocated.
func TestUDP(t *testing.T) {
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		u, err := ListenUDP(address, 4, 8)
		testkit.Must(t, err)
		conns := make([]*net.UDPConn, 2)
		for i := range conns {
			conns[i] = testkit.Result(net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(u.Addr()))).Must(t)
			defer conns[i].Close()
		}
		var in [16]byte
		var now mono.Time
		exchange := func(gap time.Duration, most, queued int) {
			for i := range 6 {
				if _, err := conns[i%2].Write([]byte("0123456789")[:6+i%3*2]); err != nil { // of 6, 8 and 10 bytes
					t.Fatal(err)
				}
			}
			var replies [2]int
			for left := 6; left > 0; {
				now = now.Add(gap)
				n, err := u.Receive(now)
				if err != nil || n != min(most, left) {
					t.Fatalf("%d datagrams, %v; %d were left", n, err, left)
				}
				for i := range n {
					which := (6 - left + i) % 3
					d, from := u.Datagram(i)
					if want := []byte("01234567")[:min(8, 6+which*2)]; !bytes.Equal(d, want) {
						t.Fatalf("%q, want %q", d, want)
					}
					testkit.MustEqual(t, from.AddrPort(), conns[((6-left+i)%2)].LocalAddr().(*net.UDPAddr).AddrPort(), "from")
					for range queued {
						u.Queue(d, from)
						replies[(6-left+i)%2]++
					}
					u.Send(d, from)
					replies[(6-left+i)%2]++
				}
				u.Flush()
				left -= n
			}
			for i, conn := range conns {
				for range replies[i] {
					if n, err := conn.Read(in[:]); err != nil || n < 6 || n > 8 {
						t.Fatalf("an answer of %d bytes, %v", n, err)
					}
				}
			}
		}
		exchange(0, 4, 2)
		if n := testing.AllocsPerRun(100, func() { u.Queue(nil, Address{}); u.Flush() }); n != 0 { // to nowhere
			t.Errorf("%v allocations", n)
		}
		exchange(closely, 1, 1)
		ended := make(chan error)
		go func() {
			n, err := u.Receive(now)
			ended <- errors.Join(err, fmt.Errorf("%d datagrams", n))
		}()
		u.Stop()
		testkit.ErrorIs(t, <-ended, net.ErrClosed)
		testkit.NoError(t, errors.Join(u.Close(), u.Close()))
	}
	if u, err := ListenUDP("no address", 1, 1); err == nil {
		t.Error(u.Addr())
	}
}
