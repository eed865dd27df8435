package conn_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"sync"
	"time"

	nsq "github.com/nsqio/go-nsq"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/auth"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
)

// authServer is an auth server without the network.
type authServer struct {
	mu struct {
		sync.Mutex
		answer string
		ttl    time.Duration
		err    error
		asked  []auth.Query
	}
}

// Ask implements conn.Authoriser.
func (p *authServer) Ask(_ context.Context, q auth.Query) (*auth.Grant, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.asked = append(p.mu.asked, q)
	if p.mu.err != nil {
		return nil, p.mu.err
	}
	g, err := auth.ParseAnswer([]byte(p.mu.answer))
	if err == nil && p.mu.ttl != 0 {
		g.TTL = p.mu.ttl
	}
	return g, err
}

// permits sets the permissions of every further answer.
func (p *authServer) permits(permissions, topic, channel string) {
	p.answers(fmt.Sprintf(`{"ttl":3600,"identity":"me","identity_url":"http://id","authorizations":[{"permissions":[%s],"topic":%q,"channels":[%q]}]}`, permissions, topic, channel))
}

// answers sets every further answer.
func (p *authServer) answers(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.err, p.mu.answer = nil, text
}

// fails sets the error of every further answer.
func (p *authServer) fails(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.err = err
}

func (p *authServer) expiresAfter(ttl time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.ttl = ttl
}

func (p *authServer) asked() []auth.Query {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.asked
}

var _ = overBoth("a node that asks an auth server", func() {
	const everything, publish, subscribe = `"publish","subscribe"`, `"publish"`, `"subscribe"`

	var (
		p *authServer
		n *secure
	)

	BeforeEach(func() {
		p = new(authServer)
		p.permits(everything, ".*", ".*")
		n = startSecure(func(c *conn.Config) { c.Auth, c.Session.AuthRequired = p, true })
	})

	authed := func() *peer {
		GinkgoHelper()
		c := n.dial()
		c.send([]byte("AUTH\n\x00\x00\x00\x06" + "secret"))
		c.expect(wire.FrameResponse, `{"identity":"me","identity_url":"http://id","permission_count":1}`)
		return c
	}
	publishing := map[string][]byte{
		"PUB":  wire.AppendPub(nil, "topic", []byte("x")),
		"MPUB": wire.AppendMpub(nil, "topic", [][]byte{[]byte("x")}),
		"DPUB": wire.AppendPub([]byte("D"), "topic 1000", []byte("x")),
	}
	sub := wire.AppendSub(nil, "topic", "channel")

	It("lets no client publish or subscribe that did not show a secret", func() {
		for verb, in := range map[string][]byte{"PUB": publishing["PUB"], "MPUB": publishing["MPUB"], "DPUB": publishing["DPUB"], "SUB": sub} {
			c := n.dial()
			Expect(c.identify(wrapping{}, "").AuthRequired).To(BeTrue())
			c.send(in)
			c.expect(wire.FrameError, HavePrefix("E_AUTH_FIRST "+verb))
			c.expectEOF()
		}
		Expect(n.broker.Topics()).To(BeEmpty())
		Expect(p.asked()).To(BeEmpty())
	})

	It("serves unmodified go-nsq clients over TLS, and gets their identities", func() {
		n = startSecure(func(c *conn.Config) {
			c.Auth, c.Session.AuthRequired = p, true
			c.TLS.ClientAuth = tls.RequestClientCert
		})
		config := quietly()
		config.AuthSecret = "a secret"
		config.TlsV1, config.TlsConfig = true, n.clientTLS(n.authority.Certificate("sensor7").TLS)
		config.Snappy = true
		got := make(chan string, 1)
		consumer, err := nsq.NewConsumer("topic", "channel", config)
		Expect(err).NotTo(HaveOccurred())
		consumer.SetLoggerLevel(nsq.LogLevelMax)
		consumer.AddHandler(nsq.HandlerFunc(func(m *nsq.Message) error {
			got <- string(m.Body)
			return nil
		}))
		Expect(consumer.ConnectToNSQD(n.address)).To(Succeed())
		producer, err := nsq.NewProducer(n.address, config)
		Expect(err).NotTo(HaveOccurred())
		producer.SetLoggerLevel(nsq.LogLevelMax)
		Expect(producer.Publish("topic", []byte("hello"))).To(Succeed())
		Eventually(got).Should(Receive(Equal("hello")))
		producer.Stop()
		consumer.Stop()
		Eventually(consumer.StopChan).Should(BeClosed())
		for _, q := range p.asked() {
			Expect(q.RemoteIP).To(Equal("127.0.0.1"))
			Expect(q.TLS).To(BeTrue())
			Expect(q.CommonName).To(Equal("sensor7"))
			Expect(q.Secret).To(Equal("a secret"))
		}
		Expect(p.asked()).To(HaveLen(2))
	})

	DescribeTable("does not let a client in",
		func(spoil func(), want string) {
			spoil()
			c := n.dial()
			c.send([]byte("AUTH\n\x00\x00\x00\x06" + "secret"))
			c.expect(wire.FrameError, want)
			c.expectEOF()
		},
		Entry("that is granted nothing", func() { p.mu.answer = `{"ttl":1}` }, "E_UNAUTHORIZED AUTH no authorizations found"),
		Entry("about whom no server answers", func() { p.fails(errors.New("no server answers")) }, "E_AUTH_FAILED AUTH failed"),
		Entry("whose answer is damaged", func() { p.mu.answer = "{" }, "E_AUTH_FAILED AUTH failed"),
	)

	It("takes one secret a connection", func() {
		c := authed()
		c.send([]byte("AUTH\n\x00\x00\x00\x05" + "other"))
		c.expect(wire.FrameError, HavePrefix("E_INVALID AUTH"))
		c.expectEOF()
		Expect(p.asked()).To(HaveLen(1))
	})

	It("holds clients to what they may do", func() {
		try := func(allowed bool, verb string, in []byte, channel string) {
			GinkgoHelper()
			c := authed()
			c.send(in)
			if allowed {
				c.expect(wire.FrameResponse, "OK")
				return
			}
			c.expect(wire.FrameError, fmt.Sprintf("E_UNAUTHORIZED AUTH failed for %s on %q %q", verb, "topic", channel))
			c.expectEOF()
		}
		all := func(mayPublish, maySubscribe bool) {
			GinkgoHelper()
			for verb, in := range publishing {
				try(mayPublish, verb, in, "")
			}
			try(maySubscribe, "SUB", sub, "channel")
		}
		p.permits(publish, "other", ".*")
		all(false, false)
		Expect(n.broker.Topics()).To(BeEmpty(), "what is refused creates nothing")
		p.permits(subscribe, ".*", "^other$")
		all(false, false)
		Expect(n.broker.Topics()).To(BeEmpty())
		p.permits(publish, "^topic$", ".*")
		all(true, false)
		p.permits(subscribe, "^topic$", "^channel$")
		all(false, true)
		p.permits(everything, ".*", ".*")
		all(true, true)
	})

	It("sends one query while the answer holds, on any number of topics", func() {
		c := authed()
		for i := range 10 {
			c.send(wire.AppendPub(nil, fmt.Sprint("topic", i%2), []byte("x")))
			c.expect(wire.FrameResponse, "OK")
		}
		Expect(p.asked()).To(HaveLen(1))
	})

	It("queries again once the answer has expired, with the same secret", func() {
		p.expiresAfter(time.Nanosecond)
		c := authed()
		for range 3 {
			c.send(publishing["PUB"])
			c.expect(wire.FrameResponse, "OK")
		}
		c.send(sub)
		c.expect(wire.FrameResponse, "OK")
		Expect(p.asked()).To(HaveLen(5))
		for _, q := range p.asked() {
			Expect(q.Secret).To(Equal("secret"))
		}
		p.permits(everything, "other", ".*")
		c.send(publishing["PUB"])
		c.expect(wire.FrameError, HavePrefix(`E_UNAUTHORIZED AUTH failed for PUB on "topic"`))
		c.expectEOF()
	})

	It("refuses clients whose answer has expired and cannot be renewed", func() {
		p.expiresAfter(time.Nanosecond)
		c := authed()
		p.fails(errors.New("no server answers"))
		c.send(publishing["PUB"])
		c.expect(wire.FrameError, "E_AUTH_FAILED AUTH failed")
		c.expectEOF()
	})

	It("ends its questions when it ends", func() {
		slow := &slowAuthServer{asked: make(chan struct{})}
		s := start(func(_ *broker.Config, c *conn.Config) { c.Auth, c.Session.AuthRequired = slow, true })
		c := s.dial()
		c.send([]byte("AUTH\n\x00\x00\x00\x06" + "secret"))
		Eventually(slow.asked).Should(BeClosed())
		ctx, cancel := context.WithTimeout(context.Background(), testkit.Hang)
		defer cancel()
		Expect(s.server.Shutdown(ctx)).To(Succeed())
		c.expect(wire.FrameError, "E_AUTH_FAILED AUTH failed")
	})
})

// slowAuthServer answers after its caller has stopped waiting.
type slowAuthServer struct{ asked chan struct{} }

func (s *slowAuthServer) Ask(ctx context.Context, _ auth.Query) (*auth.Grant, error) {
	close(s.asked)
	<-ctx.Done()
	return nil, context.Cause(ctx)
}

var _ = Describe("a configuration", func() {
	It("that contradicts itself is refused", func() {
		sc := session.DefaultConfig()
		sc.TLS, sc.AuthRequired = true, true
		err := conn.Config{Session: &sc, WriteTimeout: time.Second}.Validate()
		Expect(err).To(MatchError(And(ContainSubstring("TLS: true"), ContainSubstring("AUTH: true"))))
	})
})
