package session_test

import (
	"encoding/json"
	"errors"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
)

var _ = Describe("An upgrade", func() {
	var cfg session.Config

	BeforeEach(func() {
		cfg = session.DefaultConfig()
		cfg.TLS = true
	})

	identify := func(fields string) []byte {
		return wire.AppendIdentify(nil, []byte(`{"feature_negotiation":true,`+fields+`}`))
	}
	granted := func(p *peer) wire.IdentifyResponse {
		GinkgoHelper()
		frames := p.heard()
		Expect(frames).NotTo(BeEmpty())
		var r wire.IdentifyResponse
		Expect(json.Unmarshal([]byte(strings.TrimPrefix(frames[0], "response ")), &r)).To(Succeed(), frames[0])
		for _, f := range frames[1:] {
			Expect(f).To(Equal("response OK"))
		}
		return r
	}

	DescribeTable("is given out in the order of the wrappings, each answered OK",
		func(fields string, ops ...string) {
			p := connect(&cfg).send(identify(fields))
			frames := p.heard()
			Expect(p.did()).To(Equal(append([]string{"IDENTIFY"}, ops...)))
			Expect(frames).To(HaveLen(1 + len(ops)))
			Expect(frames[0]).To(HavePrefix("response {"))
			for _, f := range frames[1:] {
				Expect(f).To(Equal("response OK"))
			}
			p.send(wire.AppendPub(nil, "t", []byte("b")))
			Expect(p.heard()).To(Equal([]string{"response OK"}))
			Expect(p.ended()).To(BeEmpty())
		},
		Entry("none", `"tls_v1":false`),
		Entry("TLS", `"tls_v1":true`, "TLS"),
		Entry("snappy", `"snappy":true`, "snappy"),
		Entry("deflate", `"deflate":true`, "deflate level=6"),
		Entry("deflate at a level", `"deflate":true,"deflate_level":2`, "deflate level=2"),
		Entry("TLS and snappy", `"snappy":true,"tls_v1":true`, "TLS", "snappy"),
		Entry("TLS and deflate", `"deflate":true,"tls_v1":true,"deflate_level":1`, "TLS", "deflate level=1"),
	)

	It("waits until the answer to IDENTIFY was taken, one at a time", func() {
		s := session.New(&cfg, 0)
		n, _ := s.Step(wire.AppendMagic(nil), 0)
		Expect(n).To(Equal(4))
		in := identify(`"tls_v1":true,"snappy":true`)
		n, op := s.Step(in, 0)
		Expect(n).To(Equal(len(in)))
		Expect(op.Kind.Upgrade()).To(BeFalse())
		s.Done(op, nil)
		Expect(string(s.Output())).To(ContainSubstring(`"tls_v1":true`))
		s.ClearOutput()
		for _, kind := range []session.OpKind{session.OpTLS, session.OpSnappy} {
			n, op = s.Step(nil, 0)
			Expect(n).To(BeZero())
			Expect(op.Kind).To(Equal(kind))
			Expect(op.Kind.Upgrade()).To(BeTrue())
			Expect(s.Output()).To(BeEmpty())
			s.Done(op, nil)
			Expect(s.Output()).To(Equal(wire.AppendResponse(nil, wire.OK)))
			s.ClearOutput()
		}
		_, op = s.Step(nil, 0)
		Expect(op.Kind).To(Equal(session.OpNone))
		Expect(s.Need()).To(Equal(1))
	})

	DescribeTable("is not granted",
		func(spoil func(), fields string) {
			spoil()
			p := connect(&cfg).send(identify(fields))
			r := granted(p)
			Expect([]bool{r.TLSv1, r.Snappy, r.Deflate}).To(Equal([]bool{false, false, false}))
			Expect(p.did()).To(Equal([]string{"IDENTIFY"}))
		},
		Entry("where TLS is not offered", func() { cfg.TLS = false }, `"tls_v1":true`),
		Entry("where snappy is switched off", func() { cfg.Snappy = false }, `"snappy":true`),
		Entry("where deflate is switched off", func() { cfg.Deflate = false }, `"deflate":true`),
		Entry("unasked", func() {}, `"deflate_level":5`),
	)

	It("is not granted to a client that cannot read the answer", func() {
		p := connect(&cfg).send(wire.AppendIdentify(nil, []byte(`{"tls_v1":true,"snappy":true,"deflate":true}`)))
		Expect(p.heard()).To(Equal([]string{"response OK"}))
		Expect(p.did()).To(Equal([]string{"IDENTIFY"}))
		Expect(p.s.Identity().TLS).To(BeFalse())
	})

	It("to both compressions is refused", func() {
		p := connect(&cfg).send(identify(`"snappy":true,"deflate":true`))
		Expect(p.heard()).To(Equal([]string{"error E_IDENTIFY_FAILED IDENTIFY cannot have both snappy and deflate"}))
		Expect(p.ended()).To(Equal("E_IDENTIFY_FAILED"))
		Expect(p.did()).To(BeEmpty())
	})

	It("to both compressions is to the one that is offered", func() {
		cfg.Snappy = false
		p := connect(&cfg).send(identify(`"snappy":true,"deflate":true`))
		Expect(p.did()).To(Equal([]string{"IDENTIFY", "deflate level=6"}))
	})

	DescribeTable("to deflate cuts the level to what is allowed",
		func(limit int, asked string, want int) {
			cfg.MaxDeflateLevel = limit
			p := connect(&cfg).send(identify(`"deflate":true` + asked))
			Expect(granted(p).DeflateLevel).To(Equal(want))
			Expect(p.s.Identity().DeflateLevel).To(Equal(want))
		},
		Entry("none named", 6, ``, 6),
		Entry("none named, less allowed", 3, ``, 3),
		Entry("none named, more allowed", 9, ``, 6),
		Entry("the minimum", 6, `,"deflate_level":1`, 1),
		Entry("the maximum", 9, `,"deflate_level":9`, 9),
		Entry("too great", 6, `,"deflate_level":9`, 6),
		Entry("far too great", 6, `,"deflate_level":9223372036854775807`, 6),
		Entry("zero", 6, `,"deflate_level":0`, 6),
		Entry("negative", 6, `,"deflate_level":-1`, 6),
	)

	It("refuses what the client sent before it was answered", func() {
		p := connect(&cfg).send(append(identify(`"tls_v1":true`), "NOP\n"...))
		frames := p.heard()
		Expect(frames).To(HaveLen(2))
		Expect(frames[1]).To(Equal("error E_INVALID 4 bytes before the upgrade to TLS"))
		Expect(p.ended()).To(Equal("E_INVALID"))
		Expect(p.did()).To(Equal([]string{"IDENTIFY"}))
	})

	It("is the last that IDENTIFY can do", func() {
		p := connect(&cfg).send(identify(`"snappy":true`))
		p.heard()
		p.send(identify(`"deflate":true`))
		Expect(p.heard()).To(Equal([]string{"error E_INVALID IDENTIFY after an upgrade"}))
		Expect(p.ended()).To(Equal("E_INVALID"))
	})

	It("comes with a later IDENTIFY as with the first", func() {
		p := connect(&cfg).send(identify(`"tls_v1":false`)).send(identify(`"tls_v1":true`))
		Expect(p.did()).To(Equal([]string{"IDENTIFY", "IDENTIFY", "TLS"}))
		Expect(p.heard()).To(HaveLen(3))
	})

	It("that fails ends the conversation, without a frame that the client could not read", func() {
		p := connect(&cfg)
		p.outcome = func(op *session.Op) error {
			if op.Kind == session.OpTLS {
				return errors.New("handshake")
			}
			return nil
		}
		p.send(identify(`"tls_v1":true,"snappy":true`))
		Expect(p.did()).To(Equal([]string{"IDENTIFY", "TLS"}))
		Expect(p.heard()).To(HaveLen(1))
		Expect(p.ended()).To(Equal("E_IDENTIFY_FAILED"))
		_, cause := p.s.Closing()
		Expect(cause).To(MatchError(ContainSubstring("handshake")))
	})

	It("that fails sends an error where the driver knows that the client can read it", func() {
		p := connect(&cfg)
		p.outcome = func(op *session.Op) error {
			if op.Kind == session.OpTLS {
				return wire.NewError(wire.CodeIdentifyFailed, "not a TLS handshake")
			}
			return nil
		}
		p.send(identify(`"tls_v1":true`))
		Expect(p.heard()[1:]).To(Equal([]string{"error E_IDENTIFY_FAILED not a TLS handshake"}))
		Expect(p.ended()).To(Equal("E_IDENTIFY_FAILED"))
	})

	It("does not follow an IDENTIFY that the driver failed", func() {
		p := connect(&cfg)
		p.outcome = func(*session.Op) error { return errors.New("no") }
		p.send(identify(`"tls_v1":true`))
		Expect(p.did()).To(Equal([]string{"IDENTIFY"}))
		Expect(p.ended()).To(Equal("E_IDENTIFY_FAILED"))
	})

	Describe("to TLS, where it is required,", func() {
		BeforeEach(func() { cfg.TLSRequired = true })

		It("comes before every command but IDENTIFY", func() {
			for _, verb := range verbs {
				if verb == "IDENTIFY" {
					continue
				}
				for _, first := range [][]byte{nil, wire.AppendIdentify(nil, []byte(`{"tls_v1":true}`)), identify(`"tls_v1":false`)} {
					p := connect(&cfg).send(first)
					p.heard()
					p.did()
					p.send(command(verb))
					Expect(p.heard()).To(Equal([]string{"error E_INVALID " + verb + " before TLS, which is required: IDENTIFY with tls_v1"}))
					Expect(p.ended()).To(Equal("E_INVALID"))
					Expect(p.did()).To(BeEmpty())
				}
			}
		})

		It("is required before a body is read", func() {
			p := connect(&cfg).send([]byte("PUB t\n"))
			Expect(p.heard()).To(Equal([]string{"error E_INVALID PUB before TLS, which is required: IDENTIFY with tls_v1"}))
			cfg.TLSRequired, cfg.AuthRequired = false, true
			p = connect(&cfg).send([]byte("MPUB t\n"))
			Expect(p.heard()).To(Equal([]string{"error E_AUTH_FIRST MPUB needs AUTH first"}))
			p = connect(&cfg).send([]byte("AUTH\n"))
			Expect(p.heard()).To(BeEmpty())
			Expect(p.ended()).To(BeEmpty())
		})

		It("opens the way to all of them", func() {
			p := connect(&cfg).send(identify(`"tls_v1":true`))
			p.send(command("PUB")).send(command("SUB"))
			Expect(p.did()).To(Equal([]string{"IDENTIFY", "TLS", `PUB topic=t body="b"`, "SUB topic=t channel=c"}))
			Expect(p.ended()).To(BeEmpty())
		})
	})
})
