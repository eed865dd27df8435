package conn_test

import (
	"fmt"
	"log/slog"
	"path/filepath"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
)

var _ = overBoth("A capture of arrivals", func() {
	identify := func(p *peer, id string) {
		GinkgoHelper()
		p.send(wire.AppendIdentify(nil, fmt.Appendf(nil, `{"client_id":%q,"feature_negotiation":false}`, id)))
		p.expect(wire.FrameResponse, "OK")
	}
	// by counts the messages of a piece by publisher.
	by := func(n *node, topic string) map[string]int {
		GinkgoHelper()
		a := n.broker.Node().Arrivals(topic)
		Expect(a).NotTo(BeNil())
		Expect(a.First).To(BeTrue())
		counts := map[string]int{}
		for _, i := range a.Publisher {
			counts[a.Publishers[i]]++
		}
		return counts
	}
	batch := [][]byte{[]byte("x"), []byte("y"), []byte("z")}

	DescribeTable("knows the publishers by the identities that they send", func(stored bool) {
		log := slog.New(slog.NewTextHandler(GinkgoWriter, nil))
		n := start(func(b *broker.Config, _ *conn.Config) {
			if stored {
				path := GinkgoT().TempDir()
				st, err := broker.OpenStorage(broker.StorageConfig{Path: path, Metadata: filepath.Join(path, "topics.json"), MaxRecord: 1 << 20, Overflow: 20, Fsync: true, Log: log})
				Expect(err).NotTo(HaveOccurred())
				DeferCleanup(st.Close)
				b.Storage = st
			}
		})
		_, err := n.broker.CreateTopic("t")
		Expect(err).NotTo(HaveOccurred())
		Expect(n.broker.Node().Capture("t")).To(BeTrue())

		alone, together, unnamed := n.dial(), n.dial(), n.dial()
		identify(alone, "alone")
		for range 5 {
			alone.send(wire.AppendPub(nil, "t", []byte("x")))
			alone.expect(wire.FrameResponse, "OK")
		}
		identify(together, "together")
		var in []byte
		for range 100 {
			in = wire.AppendPub(in, "t", []byte("x"))
			in = wire.AppendPub(in, "other", []byte("x"))
		}
		in = wire.AppendMpub(in, "t", batch)
		in = wire.AppendPub(append(in, 'D'), "t 0", []byte("x"))
		together.send(in)
		for range 202 {
			together.expect(wire.FrameResponse, "OK")
		}
		unnamed.send(wire.AppendMpub(nil, "t", batch))
		unnamed.expect(wire.FrameResponse, "OK")
		identify(unnamed, "renamed")
		unnamed.send(wire.AppendMpub(nil, "t", batch))
		unnamed.expect(wire.FrameResponse, "OK")

		Expect(by(n, "t")).To(Equal(map[string]int{"alone": 5, "together": 104, "addr:127.0.0.1": 3, "renamed": 3}))
		Expect(n.broker.Node().Arrivals("other")).To(BeNil())
		Expect(n.broker.Node().Arrivals("t").First).To(BeFalse())
	},
		Entry("in memory", false),
		Entry("on disk", true),
	)

	It("has what is accepted, and nothing else", func() {
		n := start(func(b *broker.Config, _ *conn.Config) { b.Capacity = 10 })
		_, err := n.broker.CreateTopic("t")
		Expect(err).NotTo(HaveOccurred())
		Expect(n.broker.Node().Capture("t")).To(BeTrue())
		p := n.dial()
		identify(p, "p")
		var in []byte
		for range 25 {
			in = wire.AppendPub(in, "t", []byte("x"))
		}
		p.send(wire.AppendMpub(in, "t", batch))
		for range 10 {
			p.expect(wire.FrameResponse, "OK")
		}
		for range 16 {
			p.expect(wire.FrameError, HavePrefix("E_QUEUE_FULL"))
		}
		Expect(by(n, "t")).To(Equal(map[string]int{"p": 10}))
	})
})
