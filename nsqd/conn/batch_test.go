package conn_test

import (
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"strconv"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
)

var _ = overBoth("publishes that come together", func() {
	It("are answered in order, though topics take turns and one is full", func() {
		n := start(func(b *broker.Config, _ *conn.Config) { b.Capacity = 100 })
		p := n.dial()
		topics := []string{"a", "b", "a#ephemeral"}
		var in []byte
		const total = 600
		for i := range total {
			in = wire.AppendPub(in, topics[i/7%3], []byte("x"))
		}
		in = wire.AppendMpub(in, "b", [][]byte{[]byte("x")})
		p.send(in)
		accepted := map[string]int{}
		for i := range total {
			topic := topics[i/7%3]
			if accepted[topic] < 100 {
				p.expect(wire.FrameResponse, "OK")
				accepted[topic]++
			} else {
				p.expect(wire.FrameError, And(HavePrefix("E_QUEUE_FULL"), ContainSubstring(strconv.Quote(topic))))
			}
		}
		p.expect(wire.FrameError, HavePrefix("E_QUEUE_FULL"))
		Expect(accepted).To(Equal(map[string]int{"a": 100, "b": 100, "a#ephemeral": 100}))
		for _, t := range n.broker.Topics() {
			Expect(t.Stats().Counters.Accepted).To(BeEquivalentTo(100), t.Name())
		}
	})

	DescribeTable("wait for the disk where they have to, each once and in order", func(through, fsync bool) {
		log := slog.New(slog.NewTextHandler(GinkgoWriter, nil))
		path := GinkgoT().TempDir()
		st, err := broker.OpenStorage(broker.StorageConfig{Path: path, Metadata: filepath.Join(path, "topics.json"), MaxRecord: 1 << 20, Overflow: 20, WriteThrough: through, Fsync: fsync, Log: log})
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(st.Close)
		n := start(func(b *broker.Config, _ *conn.Config) { b.Capacity, b.Storage = 20, st })
		p := n.dial()
		const total = 3000
		sent := make(chan error, 1)
		go func() {
			var in []byte
			for i := range total {
				in = wire.AppendPub(in, "t", []byte(strconv.Itoa(i)))
			}
			_, err := p.nc.Write(in)
			sent <- err
		}()
		for range total {
			p.expect(wire.FrameResponse, "OK")
		}
		Expect(<-sent).To(Succeed())
		sub := n.dial()
		sub.send(wire.AppendRdy(wire.AppendSub(nil, "t", "c"), 10))
		sub.expect(wire.FrameResponse, "OK")
		for i := range total {
			m := sub.message()
			Expect(string(m.Body)).To(Equal(strconv.Itoa(i)))
			sub.send(wire.AppendFin(nil, m.ID))
		}
	},
		Entry("what memory does not hold", false, false),
		Entry("everything", true, false),
		Entry("everything, for good", true, true),
	)

	It("are on the disk once each, whether their connections stay or end", func() {
		log := slog.New(slog.NewTextHandler(GinkgoWriter, nil))
		path := GinkgoT().TempDir()
		st, err := broker.OpenStorage(broker.StorageConfig{Path: path, Metadata: filepath.Join(path, "topics.json"), MaxRecord: 1 << 20, Overflow: 20, WriteThrough: true, Fsync: true, Log: log})
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(st.Close)
		n := start(func(b *broker.Config, _ *conn.Config) { b.Capacity, b.Storage = 20, st })
		const publishers, each = 30, 20
		var peers []*peer
		for range publishers {
			peers = append(peers, n.dial())
		}
		want := map[string]int{}
		for i := range each {
			for j, p := range peers {
				body := fmt.Sprintf("%d %d", j, i)
				want[body] = 1
				in := wire.AppendPub(nil, [...]string{"t", "u"}[j%2], []byte(body))
				if j%5 == 0 { // more commands come while the connection waits for the disk
					in = wire.AppendNop(append(in, wire.AppendMpub(nil, "t", [][]byte{[]byte("more " + body)})...))
					want["more "+body] = 1
				}
				p.send(in)
				if j%3 == 0 && i == each-1 {
					Expect(p.nc.(*net.TCPConn).CloseWrite()).To(Succeed())
				}
			}
			for j, p := range peers {
				p.expect(wire.FrameResponse, "OK")
				if j%5 == 0 {
					p.expect(wire.FrameResponse, "OK")
				}
			}
		}
		for j, p := range peers {
			if j%3 == 0 {
				p.expectEOF()
			}
		}
		got := map[string]int{}
		for _, topic := range []string{"t", "u"} {
			sub := n.dial()
			sub.send(wire.AppendRdy(wire.AppendSub(nil, topic, "c"), 10))
			sub.expect(wire.FrameResponse, "OK")
			t, err := n.broker.Topic([]byte(topic))
			Expect(err).NotTo(HaveOccurred())
			for range t.Stats().Counters.Accepted {
				m := sub.message()
				got[string(m.Body)]++
				sub.send(wire.AppendFin(nil, m.ID))
			}
		}
		Expect(got).To(Equal(want))
	})

	It("go to a topic's next life when it is deleted meanwhile", func() {
		n := start(nil)
		p := n.dial()
		const rounds, each = 30, 100
		var in []byte
		for range each {
			in = wire.AppendPub(in, "t", []byte("x"))
		}
		for range rounds {
			sent := make(chan error, 1)
			go func() {
				_, err := p.nc.Write(in)
				sent <- err
			}()
			p.expect(wire.FrameResponse, "OK")
			Expect(n.broker.DeleteTopic("t")).To(Or(Succeed(), MatchError(broker.ErrUnknownTopic)))
			for range each - 1 {
				p.expect(wire.FrameResponse, "OK")
			}
			Expect(<-sent).To(Succeed())
		}
	})
})

var _ = overBoth("FINs that come together", func() {
	It("end their messages in order, among other commands, and each is refused by itself", func() {
		n := start(nil)
		p := n.dial()
		const total = 200 // more than a batch
		var in []byte
		for range total {
			in = wire.AppendPub(in, "t", []byte("x"))
		}
		p.send(in)
		for range total {
			p.expect(wire.FrameResponse, "OK")
		}
		sub := n.dial()
		sub.send(wire.AppendRdy(wire.AppendSub(nil, "t", "c"), total))
		sub.expect(wire.FrameResponse, "OK")
		var ids []wire.MessageID
		for range total {
			ids = append(ids, sub.message().ID)
		}
		in = wire.AppendRdy(nil, 0)
		for i, id := range ids {
			in = wire.AppendFin(in, id)
			switch i {
			case 10, 100:
				in = wire.AppendFin(in, id) // twice
			case 20, 120:
				in = wire.AppendPub(in, "other", []byte("x"))
			case 30:
				in = fmt.Appendf(in, "TOUCH %s\n", id) // of a message finished just before
			}
		}
		sub.send(append(in, "CLS\n"...))
		refused := func(verb string, id wire.MessageID) {
			sub.expect(wire.FrameError, Equal("E_"+verb+"_FAILED "+verb+" "+id.String()+" failed"))
		}
		refused("FIN", ids[10])
		sub.expect(wire.FrameResponse, "OK")
		refused("TOUCH", ids[30])
		refused("FIN", ids[100])
		sub.expect(wire.FrameResponse, "OK")
		sub.expect(wire.FrameResponse, "CLOSE_WAIT")
		t, err := n.broker.Topic([]byte("t"))
		Expect(err).NotTo(HaveOccurred())
		c := t.Stats().Channels[0]
		Expect(c.Counters.Finished).To(BeEquivalentTo(total))
		Expect(c.Ready + c.InFlight).To(BeZero())
	})
})
