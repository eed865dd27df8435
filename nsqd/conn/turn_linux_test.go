package conn_test

import (
	"bytes"
	"log/slog"
	"net"
	"sync"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/mqtt/packet"
	"github.com/srtm-io/srtm/mqtt/session"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
)

// stopper is a log that stops the event loop that writes to it, until the spec releases the loop.
type stopper struct {
	once             sync.Once
	stopped, release chan struct{}
}

// Write implements io.Writer.
func (s *stopper) Write(line []byte) (int, error) {
	if bytes.Contains(line, []byte("connection closed")) {
		s.once.Do(func() {
			close(s.stopped)
			<-s.release
		})
	}
	return len(line), nil
}

// served returns a connection that its loop reads. After dial, the loop may not know the connection
// yet.
func (n *node) served() *peer {
	GinkgoHelper()
	p := n.dial()
	p.send(wire.AppendPub(nil, "other", []byte("message")))
	p.expect(wire.FrameResponse, "OK")
	return p
}

// unread returns the number of sent bytes that the server's kernel has not acknowledged.
func (p *peer) unread() (n int) {
	raw, err := p.nc.(*net.TCPConn).SyscallConn()
	Expect(err).NotTo(HaveOccurred())
	Expect(raw.Control(func(fd uintptr) { n, err = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) })).To(Succeed())
	Expect(err).NotTo(HaveOccurred())
	return n
}

// Both connections have input when the loop's turn begins, and the flood is first.
var _ = Describe("a flood of cheap commands in one read", func() {
	// published returns the bodies of topic t in their order, after the loop has read flood and then a
	// publish of another connection.
	published := func(n *node, loop *stopper, flood func(), other *peer) (bodies []string) {
		GinkgoHelper()
		bad := n.dial()
		bad.send([]byte("NONSENSE\n"))
		Eventually(loop.stopped).Should(BeClosed())
		flood()
		other.send(wire.AppendPub(nil, "t", []byte("the other's")))
		Eventually(other.unread).Should(BeZero()) // a busy kernel may deliver it later than send returns
		close(loop.release)
		other.send(wire.AppendRdy(wire.AppendSub(nil, "t", "c"), 2))
		other.expect(wire.FrameResponse, "OK")
		other.expect(wire.FrameResponse, "OK")
		for range 2 {
			bodies = append(bodies, string(other.message().Body))
		}
		return bodies
	}
	stop := func(c *conn.Config) *stopper {
		s := &stopper{stopped: make(chan struct{}), release: make(chan struct{})}
		c.Loops = 1
		log = slog.New(slog.NewTextHandler(s, nil))
		DeferCleanup(func() { log = nil })
		return s
	}

	It("lets other connections of the loop have their turn, over NSQ", func() {
		var loop *stopper
		n := start(func(_ *broker.Config, c *conn.Config) { loop = stop(c) })
		flooder, other := n.served(), n.served()
		Expect(published(n, loop, func() {
			flooder.send(wire.AppendPub(bytes.Repeat(wire.AppendNop(nil), 10_000), "t", []byte("the flooder's")))
		}, other)).To(Equal([]string{"the other's", "the flooder's"}))
	})

	It("lets other connections of the loop have their turn, over MQTT", func() {
		var loop *stopper
		n, dial := startMQTT(func(*broker.Config, *session.Config) {}, func(c *conn.Config) { loop = stop(c) })
		flooder, other := dial(5, "flooder"), n.served()
		Expect(published(n, loop, func() {
			refused := packet.AppendPublish(nil, 5, "no topic", 2, []byte("x"))
			flooder.send(packet.AppendPublish(bytes.Repeat(refused, 3_000), 5, "t", 1, []byte("the flooder's")))
		}, other)).To(Equal([]string{"the other's", "the flooder's"}))
	})
})
