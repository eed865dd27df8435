package conn_test

import (
	"context"
	"net"
	"os"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/auth"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
)

// slow is an auth server that delays its answers until the spec permits them.
type slow struct {
	asked, gone chan struct{} // a request came; its context ended
	answer      chan struct{} // closed: answer all
	delay       time.Duration // 0: no answer before answer is closed; otherwise answer after the delay
}

// Ask implements conn.Authoriser.
func (s *slow) Ask(ctx context.Context, _ auth.Query) (*auth.Grant, error) {
	s.asked <- struct{}{}
	var after <-chan time.Time
	if s.delay > 0 {
		timer := time.NewTimer(s.delay)
		defer timer.Stop()
		after = timer.C
	}
	grant := func() (*auth.Grant, error) {
		return auth.ParseAnswer([]byte(`{"ttl":3600,"authorizations":[{"permissions":["publish"],"topic":".*","channels":[".*"]}]}`))
	}
	select {
	case <-s.answer:
		return grant()
	case <-after:
		return grant()
	case <-ctx.Done():
		s.gone <- struct{}{}
		return nil, context.Cause(ctx)
	}
}

// The connection is on an event loop while its operation waits on another goroutine.
var _ = Describe("a connection with an offloaded operation", func() {
	var (
		s *slow
		n *node

		heartbeat = time.Minute
	)
	JustBeforeEach(func() {
		s = &slow{make(chan struct{}, 10), make(chan struct{}, 10), make(chan struct{}), 0}
		n = start(func(_ *broker.Config, c *conn.Config) {
			c.Loops, c.Auth, c.Session.AuthRequired = 1, s, true
			c.Session.HeartbeatInterval = heartbeat
		})
	})
	pub := wire.AppendPub(nil, "t", []byte("x"))
	// offloaded returns a connection whose AUTH waits for the auth server.
	offloaded := func(more []byte) *peer {
		GinkgoHelper()
		p := n.dial()
		p.send(append([]byte("AUTH\n\x00\x00\x00\x06"+"secret"), more...))
		Eventually(s.asked).Should(Receive())
		return p
	}
	descriptors := func() int {
		all, err := os.ReadDir("/proc/self/fd")
		Expect(err).NotTo(HaveOccurred())
		return len(all)
	}

	Context("with short heartbeats", func() {
		BeforeEach(func() {
			was := heartbeat
			heartbeat = 20 * time.Millisecond
			DeferCleanup(func() { heartbeat = was })
		})
		// Only time orders the loop's turn and the answer, so the race detector reports an access by the loop.
		It("is left alone when a heartbeat is due", func() {
			s.delay = 4 * heartbeat
			p := offloaded(wire.AppendNop(nil))
			p.expect(wire.FrameResponse, ContainSubstring("permission_count"))
		})
	})

	It("gives its descriptor back when the peer has gone", func() {
		leave := func() {
			for i := range 4 {
				p := offloaded(nil)
				if i%2 == 0 {
					Expect(p.nc.(*net.TCPConn).SetLinger(0)).To(Succeed()) // a reset
				}
				Expect(p.nc.Close()).To(Succeed())
			}
			for range 4 {
				Eventually(s.gone).Should(Receive(), "the question is taken back")
			}
			Eventually(func() int { return n.server.Stats().Connections }).Should(BeZero())
		}
		leave() // the loops have opened their descriptors; a loop may not have closed the last connections yet
		before := descriptors()
		for range 3 {
			leave()
		}
		Eventually(descriptors).Should(BeNumerically("<=", before))
	})

	It("answers a peer that has only ended its own side", func() {
		p := offloaded(pub)
		Expect(p.nc.(*net.TCPConn).CloseWrite()).To(Succeed())
		close(s.answer)
		p.expect(wire.FrameResponse, ContainSubstring("permission_count"))
		p.expect(wire.FrameResponse, "OK")
		p.expectEOF()
	})
})

// A waiting subscription may outlive its descriptor. Another connection may then get the number of the descriptor, and
// messages published on the other connection are stamped all the same.
var _ = Describe("a subscription whose peer has gone", func() {
	It("leaves the connection alone that has its descriptor now", func() {
		asked, answer := make(chan struct{}), make(chan struct{})
		n := startWith(hook.Timestamping, func(b *broker.Config, c *conn.Config) {
			c.Loops = 1
			b.Channels = func(topic string) []string {
				if topic == "slow" {
					close(asked)
					<-answer
				}
				return nil
			}
		})
		gone := n.dial()
		gone.send(wire.AppendSub(nil, "slow", "c"))
		Eventually(asked).Should(BeClosed())
		descriptors := func() int {
			all, err := os.ReadDir("/proc/self/fd")
			Expect(err).NotTo(HaveOccurred())
			return len(all)
		}
		before := descriptors()
		Expect(gone.nc.(*net.TCPConn).SetLinger(0)).To(Succeed()) // a reset
		Expect(gone.nc.Close()).To(Succeed())
		Eventually(descriptors).Should(Equal(before - 2))
		var others []*peer // a new connection gets the number
		for range 4 {
			p := n.dial()
			p.send(wire.AppendPub(nil, "t", []byte("x")))
			p.expect(wire.FrameResponse, "OK")
			others = append(others, p)
		}
		close(answer)
		Eventually(func() int { return n.server.Stats().Connections }).Should(Equal(len(others)))
		unstamped := n.stamps.Info().Counters.Arrivals[stamp.Read]
		for _, p := range others {
			p.send(wire.AppendPub(nil, "t", []byte("x")))
			p.expect(wire.FrameResponse, "OK")
		}
		Expect(n.stamps.Info().Counters.Arrivals[stamp.Read]).To(Equal(unstamped))
	})
})
