package conn_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
)

var _ = Describe("connections that change loops", func() {
	const publishers, each = 12, 300

	// Encrypted connections stay on loops, too.
	DescribeTable("lose nothing, repeat nothing and keep the order, while loops come and go", func(w wrapping) {
		authority := testkit.NewAuthority(GinkgoTB())
		n := &secure{authority: authority, node: start(func(b *broker.Config, c *conn.Config) {
			b.Capacity, c.Loops = publishers*each, 1
			c.Session.TLS, c.TLS = true, &tls.Config{Certificates: []tls.Certificate{authority.Certificate("nsqd").TLS}}
		})}
		subscribe := func(channel string, ready int) *peer {
			p := n.dial()
			Expect(p.nc.(*net.TCPConn).SetReadBuffer(64 << 10)).To(Succeed())
			p.upgrade(n, w, "")
			p.send(wire.AppendSub(nil, "t", channel))
			p.expect(wire.FrameResponse, "OK")
			p.send(wire.AppendRdy(nil, ready))
			return p
		}
		// One subscriber reads at once. The other reads only after all messages are published, so its messages wait.
		prompt, late := subscribe("prompt", 50), subscribe("late", 2500)
		ctx, cancel := context.WithCancel(context.Background())
		var all sync.WaitGroup
		DeferCleanup(func() { cancel(); all.Wait() })
		for p := range publishers {
			peer := n.dial()
			peer.upgrade(n, w, "")
			all.Go(func() {
				defer GinkgoRecover()
				random := rand.New(rand.NewPCG(1, uint64(p)))
				for i := range each {
					cmd := wire.AppendPub(nil, "t", fmt.Appendf(nil, "%d %d %s", p, i, strings.Repeat("x", random.IntN(9000))))
					cut := random.IntN(len(cmd)) // the read part of a command moves with the connection
					peer.send(cmd[:cut])
					peer.send(cmd[cut:])
					peer.expect(wire.FrameResponse, "OK")
				}
			})
		}
		var changes int
		changed := make(chan struct{})
		go func() {
			defer close(changed)
			random := rand.New(rand.NewPCG(2, uint64(GinkgoRandomSeed())))
			for ctx.Err() == nil {
				if n.server.Shuffle(random, 4) {
					changes++
				}
				select {
				case <-ctx.Done():
				case <-time.After(200 * time.Microsecond):
				}
			}
		}()

		receive := func(sub *peer) {
			GinkgoHelper()
			var next [publishers]int
			Expect(sub.nc.SetDeadline(time.Now().Add(testkit.Hang))).To(Succeed())
			for range publishers * each {
				m := sub.message()
				var p, i int
				_, err := fmt.Sscanf(string(m.Body), "%d %d", &p, &i)
				Expect(err).NotTo(HaveOccurred())
				Expect(i).To(Equal(next[p]), "of publisher %d", p)
				next[p]++
				sub.send(wire.AppendFin(nil, m.ID))
			}
		}
		receive(prompt)
		all.Wait()
		receive(late)
		cancel()
		<-changed
		Expect(changes).To(BeNumerically(">", 20))
		Eventually(func() (sum int) {
			for _, l := range n.server.Stats().Loops {
				sum += l.Connections
			}
			return sum
		}).Should(Equal(publishers + 2))
	},
		Entry("plain", wrapping{}),
		Entry("encrypted", wrapping{tls: true}),
	)

	It("end when the node does, in the middle of a handshake", func() {
		n := startSecure(func(c *conn.Config) { c.Loops = 1 })
		p := n.dial()
		Expect(p.identify(wrapping{tls: true}, "").TLSv1).To(BeTrue()) // the handshake waits for the client longer than a node may take to end
	})

	It("answers who waits for something else meanwhile", func() {
		n := start(func(_ *broker.Config, c *conn.Config) { c.Loops = 1 })
		random := rand.New(rand.NewPCG(3, uint64(GinkgoRandomSeed())))
		for i := range 200 {
			p := n.dial() // a new connection, and a new topic
			p.send(wire.AppendSub(nil, fmt.Sprintf("t%d", i), "c"))
			n.server.Shuffle(random, 3)
			p.expect(wire.FrameResponse, "OK")
			Expect(p.nc.Close()).To(Succeed())
		}
		Eventually(func() int { return n.server.Stats().Connections }).Should(BeZero())
	})
})

// holding is a connection that keeps written data until the test releases the data.
type holding struct {
	net.Conn
	holds bool
	held  []byte
}

func (h *holding) Write(p []byte) (int, error) {
	if h.holds {
		h.held = append(h.held, p...)
		return len(p), nil
	}
	return h.Conn.Write(p)
}

var _ = Describe("a publish that was read ahead, of one that waits for the disk", func() {
	It("is stored though nothing else happens", func() {
		authority := testkit.NewAuthority(GinkgoTB())
		log := slog.New(slog.NewTextHandler(GinkgoWriter, nil))
		path := GinkgoT().TempDir()
		st, err := broker.OpenStorage(broker.StorageConfig{Path: path, Metadata: filepath.Join(path, "topics.json"), MaxRecord: 1 << 20, Overflow: 20, WriteThrough: true, Fsync: true, Log: log})
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(st.Close)
		n := &secure{authority: authority, node: start(func(b *broker.Config, c *conn.Config) {
			b.Capacity, b.Storage, c.Loops = 20, st, 1
			c.Session.TLS, c.TLS = true, &tls.Config{Certificates: []tls.Certificate{authority.Certificate("nsqd").TLS}}
		})}
		p := n.dial()
		h := &holding{Conn: p.nc}
		p.nc = h
		p.upgrade(n, wrapping{tls: true}, "")
		pub := wire.AppendPub(nil, "t", []byte("x"))
		p.send(pub) // the topic exists
		p.expect(wire.FrameResponse, "OK")
		h.holds = true
		p.send(append(slices.Clone(pub), pub...)) // a record of two publishes, with which a goroutine continues alone
		p.send(pub)                               // and a record of one, already read when the goroutine returns
		h.holds = false
		Expect(h.Write(h.held)).Error().NotTo(HaveOccurred())
		for range 3 {
			p.expect(wire.FrameResponse, "OK")
		}
	})
})
