package server_test

import (
	"net"
	"testing"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/wire"
	"github.com/srtm-io/srtm/internal/testkit"
)

// A decision allocates nothing, from reading the datagram to sending the answer. Any other allocation
// of this process during the test would count.
func TestAllocation(t *testing.T) {
	b := newBench(t, rule.Rule{Key: "key", Share: share(1, 1e9)})
	s, _ := b.start()
	conn := testkit.Result(net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(s.Addr()))).Must(t)
	defer conn.Close()
	sealer, err := wire.NewSealer(nil)
	testkit.Must(t, err)
	q := wire.Question{Kind: wire.Hello, Number: 1}
	var out, in [wire.MaxQuestion]byte
	var a wire.Answer
	ask := func() {
		q.Number++
		testkit.Result(conn.Write(sealer.AppendQuestion(out[:0], q))).Must(t)
		n, err := conn.Read(in[:])
		testkit.Must(t, err)
		a, err = sealer.ParseAnswer(in[:n])
		testkit.Must(t, err)
	}
	ask()
	q.Kind, q.Session, q.Cost, q.Key = wire.Ask, a.Session, 1, []byte("key")
	ask() // looks the key up
	if n := testing.AllocsPerRun(2000, ask); n != 0 || a.Kind != wire.Reply || a.Flags&wire.Admit == 0 {
		t.Errorf("%v allocations; the last answer is %+v", n, a)
	}
}
