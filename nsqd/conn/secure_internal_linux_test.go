package conn

import (
	"crypto/tls"
	"log/slog"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsqd/broker"
)

// gathered collects its writes in out while on is set.
type gathered struct {
	net.Conn
	out []byte
	on  bool
}

func (g *gathered) Write(b []byte) (int, error) {
	if !g.on {
		return g.Conn.Write(b)
	}
	g.out = append(g.out, b...)
	return len(b), nil
}

// Records of one byte take 23 times as many bytes to read and decrypt. A loop turns to other connections after as many
// bytes of the socket as without TLS.
func TestATurnEndsByWhatIsReadOfTheSocket(t *testing.T) {
	const records = 10_000
	authority := testkit.NewAuthority(t)
	protocol := session.DefaultConfig()
	protocol.TLS = true
	b := testkit.Result(broker.New(broker.Config{Capacity: 10, MaxMsgTimeout: time.Minute})).Must(t)
	defer b.Close()
	log := slog.New(slog.DiscardHandler)
	stamps := testkit.Result(hook.Open(hook.Off, hook.Config{}, log)).Must(t)
	server := testkit.Result(New(Config{
		Session: &protocol, TLS: &tls.Config{Certificates: []tls.Certificate{authority.Certificate("nsqd").TLS}}, WriteTimeout: testkit.Hang,
	}, b, stamps, log)).Must(t)
	defer server.endLog()
	l := testkit.Result(newLoop(&loops{env: &server.env}, 0)).Must(t)
	defer l.close()

	ends := testkit.Result(unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)).Must(t)
	testkit.Must(t, unix.SetsockoptInt(ends[0], unix.SOL_SOCKET, unix.SO_SNDBUF, 2<<20))
	file := os.NewFile(uintptr(ends[0]), "client")
	nc := testkit.Result(net.FileConn(file)).Must(t)
	defer nc.Close()
	testkit.Must(t, file.Close())
	testkit.Must(t, nc.SetDeadline(time.Now().Add(testkit.Hang)))

	l.serve(ends[1], "", NSQ)
	s := l.inbox.mu.slots[0]
	l.drainInbox()
	defer l.fail(s, nil)
	upgraded := make(chan error)
	go func() { upgraded <- s.upgradeTLS() }()
	g := &gathered{Conn: nc}
	client := tls.Client(g, &tls.Config{RootCAs: authority.Pool, ServerName: "localhost"})
	testkit.Must(t, client.Handshake())
	testkit.Must(t, <-upgraded)

	g.on = true
	testkit.Result(client.Write([]byte("  V2"))).Must(t)
	const atOnce = 2 << 10 // bytes of one read of hook.Records; no read ends with a record
	for i := range records {
		size := 1
		if atOnce-len(g.out)%atOnce < 50 {
			size = 53
		}
		testkit.Result(client.Write([]byte(strings.Repeat("NOP\n", 15))[i%4:][:size])).Must(t)
	}
	testkit.Result(nc.Write(g.out)).Must(t)
	from := s.secure.Offset()
	l.readable(s)
	if read := s.secure.Offset() - from; read > loopBuffer+1000 || read < loopBuffer {
		t.Errorf("%d bytes of %d were read at once", read, len(g.out))
	}
}

// If a connection is cut before its first turn, the connection ends with the first turn.
func TestCutOnArrival(t *testing.T) {
	protocol := session.DefaultConfig()
	b := testkit.Result(broker.New(broker.Config{Capacity: 10, MaxMsgTimeout: time.Minute})).Must(t)
	defer b.Close()
	log := slog.New(slog.DiscardHandler)
	stamps := testkit.Result(hook.Open(hook.Off, hook.Config{}, log)).Must(t)
	server := testkit.Result(New(Config{Session: &protocol, WriteTimeout: testkit.Hang}, b, stamps, log)).Must(t)
	defer server.endLog()
	l := testkit.Result(newLoop(&loops{env: &server.env}, 0)).Must(t)
	defer l.close()
	ends := testkit.Result(unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)).Must(t)
	defer unix.Close(ends[0])
	l.serve(ends[1], "client", NSQ)
	server.clients.each((*client).cut)
	l.drainInbox()
	testkit.Equal(t, server.clients.len(), 0, "connections")
}
