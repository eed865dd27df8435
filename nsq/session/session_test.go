package session_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
)

func TestSession(t *testing.T) {
	RegisterFailHandler(Fail)
	RunSpecs(t, "nsq/session")
}

const second = mono.Time(time.Second)

var _ = Describe("Session", func() {
	var cfg session.Config

	BeforeEach(func() {
		cfg = session.DefaultConfig()
		cfg.Version = "SRTM test"
	})

	identify := func(json string) []byte { return wire.AppendIdentify(nil, []byte(json)) }
	pub := func(body string) []byte { return wire.AppendPub(nil, "t", []byte(body)) }
	sub := func() []byte { return wire.AppendSub(nil, "t", "c") }

	Describe("the magic", func() {
		It("is waited for, and needs nothing from the driver", func() {
			p := newPeer(&cfg)
			Expect(p.s.Need()).To(Equal(4))
			p.send([]byte("  V"))
			Expect(p.s.Need()).To(Equal(4))
			Expect(p.buf).To(HaveLen(3))
			p.send([]byte("2"))
			Expect(p.buf).To(BeEmpty())
			Expect(p.s.Need()).To(Equal(1))
			Expect(p.did()).To(BeEmpty())
			Expect(p.heard()).To(BeEmpty())
			Expect(p.ended()).To(BeEmpty())
		})

		It("of another protocol ends the conversation", func() {
			p := newPeer(&cfg).send([]byte("GET / HTTP/1.1\r\n"))
			Expect(p.ended()).To(Equal("E_BAD_PROTOCOL"))
			Expect(p.heard()).To(ConsistOf(HavePrefix("error E_BAD_PROTOCOL ")))
			Expect(p.buf).To(HaveLen(16), "nothing is consumed")
		})

		It("may come in one piece with commands", func() {
			p := newPeer(&cfg).send(append(wire.AppendMagic(nil), pub("b")...))
			Expect(p.did()).To(Equal([]string{`PUB topic=t body="b"`}))
			Expect(p.heard()).To(Equal([]string{"response OK"}))
		})
	})

	Describe("IDENTIFY", func() {
		It("is answered OK when the client does not negotiate", func() {
			p := connect(&cfg).send(identify(`{"client_id":"c","hostname":"h","user_agent":"a/1"}`))
			Expect(p.did()).To(Equal([]string{"IDENTIFY"}))
			Expect(p.heard()).To(Equal([]string{"response OK"}))
			got := p.s.Identity()
			Expect([]string{got.ClientID, got.Hostname, got.UserAgent}).To(Equal([]string{"c", "h", "a/1"}))
		})

		It("takes the names that old clients use", func() {
			p := connect(&cfg).send(identify(`{"short_id":"s","long_id":"l"}`))
			Expect(p.s.Identity().ClientID).To(Equal("s"))
			Expect(p.s.Identity().Hostname).To(Equal("l"))
			p = connect(&cfg).send(identify(`{"short_id":"s","client_id":"c","long_id":"l","hostname":"h"}`))
			Expect(p.s.Identity().ClientID).To(Equal("c"))
			Expect(p.s.Identity().Hostname).To(Equal("h"))
		})

		It("leaves the server's defaults where the client sends nothing, or zero", func() {
			for _, body := range []string{`{}`, `{"heartbeat_interval":0,"output_buffer_size":0,"output_buffer_timeout":0,"msg_timeout":0,"sample_rate":0,"deflate_level":0}`} {
				p := connect(&cfg)
				before := p.s.Identity()
				p.send(identify(body))
				Expect(p.s.Identity()).To(Equal(before))
				Expect(before.HeartbeatInterval).To(Equal(30 * time.Second))
				Expect(before.OutputBufferSize).To(Equal(16384))
				Expect(before.OutputBufferTimeout).To(Equal(250 * time.Millisecond))
				Expect(before.MsgTimeout).To(Equal(time.Minute))
				Expect(before.SampleRate).To(BeZero())
			}
		})

		It("answers a negotiating client with all that was granted", func() {
			p := connect(&cfg).send(identify(`{"feature_negotiation":true,"heartbeat_interval":5000,"output_buffer_size":1024,` +
				`"output_buffer_timeout":100,"msg_timeout":2000,"sample_rate":25,` +
				`"tls_v1":true,"deflate":false,"deflate_level":3}`))
			frames := p.heard()
			Expect(frames).To(HaveLen(1))
			Expect(strings.TrimPrefix(frames[0], "response ")).To(MatchJSON(`{
				"max_rdy_count":2500, "version":"SRTM test", "max_msg_timeout":900000, "msg_timeout":2000,
				"tls_v1":false, "deflate":false, "deflate_level":3, "max_deflate_level":6, "snappy":false,
				"sample_rate":25, "auth_required":false, "output_buffer_size":1024, "output_buffer_timeout":100}`))
			got := p.s.Identity()
			Expect(got.HeartbeatInterval).To(Equal(5 * time.Second))
			Expect(got.OutputBufferSize).To(Equal(1024))
			Expect(got.OutputBufferTimeout).To(Equal(100 * time.Millisecond))
			Expect(got.MsgTimeout).To(Equal(2 * time.Second))
			Expect(got.SampleRate).To(Equal(25))
		})

		It("turns off with -1 what can be turned off", func() {
			p := connect(&cfg).send(identify(`{"feature_negotiation":true,"heartbeat_interval":-1,"output_buffer_size":-1,"output_buffer_timeout":-1}`))
			got := p.s.Identity()
			Expect(got.HeartbeatInterval).To(BeZero())
			Expect(got.OutputBufferSize).To(BeZero())
			Expect(got.OutputBufferTimeout).To(BeZero())
			var answer wire.IdentifyResponse
			Expect(json.Unmarshal([]byte(strings.TrimPrefix(p.heard()[0], "response ")), &answer)).To(Succeed())
			Expect(answer.OutputBufferSize).To(Equal(-1))
			Expect(answer.OutputBufferTimeout).To(Equal(int64(-1)))
		})

		DescribeTable("takes a value at either end of its range",
			func(body string) {
				p := connect(&cfg).send(identify(body))
				Expect(p.heard()).To(Equal([]string{"response OK"}))
			},
			Entry(nil, `{"heartbeat_interval":1000}`),
			Entry(nil, `{"heartbeat_interval":60000}`),
			Entry(nil, `{"output_buffer_size":64}`),
			Entry(nil, `{"output_buffer_size":65536}`),
			Entry(nil, `{"output_buffer_timeout":25}`),
			Entry(nil, `{"output_buffer_timeout":30000}`),
			Entry(nil, `{"msg_timeout":1000}`),
			Entry(nil, `{"msg_timeout":900000}`),
			Entry(nil, `{"sample_rate":99}`),
			Entry(nil, `{"client_id":"`+strings.Repeat("c", 256)+`"}`),
			Entry("go-nsq's default of a level that is not used", `{"deflate_level":9}`),
			Entry("fields of other versions", `{"topology_zone":"z","new":{"a":[1]}}`),
		)

		DescribeTable("refuses, grants nothing and closes",
			func(body, why string) {
				p := connect(&cfg)
				before := p.s.Identity()
				p.send(identify(body))
				Expect(p.heard()).To(ConsistOf(HavePrefix("error E_BAD_BODY IDENTIFY " + why)))
				Expect(p.ended()).To(Equal("E_BAD_BODY"))
				Expect(p.did()).To(BeEmpty())
				Expect(p.s.Identity()).To(Equal(before))
			},
			Entry(nil, `{"heartbeat_interval":999}`, "heartbeat interval (999) is invalid"),
			Entry(nil, `{"heartbeat_interval":60001}`, "heartbeat interval (60001) is invalid"),
			Entry(nil, `{"heartbeat_interval":-2}`, "heartbeat interval (-2) is invalid"),
			Entry("the longest that wraps around in nanoseconds", fmt.Sprintf(`{"heartbeat_interval":%d}`, math.MaxInt64), "heartbeat interval ("),
			Entry(nil, `{"output_buffer_size":63}`, "output_buffer_size 63 is not -1 or in [64, 65536]"),
			Entry(nil, `{"output_buffer_size":65537}`, "output_buffer_size 65537 "),
			Entry(nil, `{"output_buffer_size":-2}`, "output_buffer_size -2 "),
			Entry(nil, `{"output_buffer_timeout":24}`, "output_buffer_timeout 24 is not -1 or in [25, 30000] ms"),
			Entry(nil, `{"output_buffer_timeout":30001}`, "output_buffer_timeout 30001 "),
			Entry(nil, `{"output_buffer_timeout":-2}`, "output_buffer_timeout -2 "),
			Entry(nil, `{"msg_timeout":900001}`, "msg_timeout 900001 is outside [1000, 900000] ms"),
			Entry(nil, `{"msg_timeout":999}`, "msg_timeout 999 "),
			Entry(nil, `{"msg_timeout":-1}`, "msg_timeout -1 "),
			Entry(nil, `{"sample_rate":100}`, "sample_rate 100 is outside [0, 99]"),
			Entry(nil, `{"sample_rate":-1}`, "sample_rate -1 "),
			Entry("a name that would be kept for ever", `{"client_id":"`+strings.Repeat("c", 257)+`"}`, "client_id of 257 bytes is longer than 256"),
			Entry(nil, `{"hostname":"`+strings.Repeat("h", 257)+`"}`, "hostname of 257 bytes"),
			Entry(nil, `{"user_agent":"`+strings.Repeat("u", 257)+`"}`, "user_agent of 257 bytes"),
			Entry(nil, `{`, "body is not the JSON it should be"),
			Entry(nil, `[]`, "body is not the JSON it should be"),
			Entry(nil, `{} {}`, "body is not the JSON it should be"),
			Entry(nil, `{"heartbeat_interval":"30s"}`, "body is not the JSON it should be"),
			Entry(nil, `{"heartbeat_interval":1500.5}`, "body is not the JSON it should be"),
			Entry(nil, `{"heartbeat_interval":99999999999999999999}`, "body is not the JSON it should be"),
		)

		DescribeTable("comes before SUB, at any time",
			func(before []byte) {
				p := connect(&cfg).send(before)
				p.heard()
				p.send(identify(`{"client_id":"late","msg_timeout":6000}`))
				Expect(p.heard()).To(Equal([]string{"response OK"}))
				Expect(p.s.Identity().ClientID).To(Equal("late"))
				Expect(p.s.Identity().MsgTimeout).To(Equal(6 * time.Second))
			},
			Entry("again: the last one counts", identify(`{"client_id":"early","msg_timeout":5000}`)),
			Entry("after PUB", pub("b")),
			Entry("after NOP", wire.AppendNop(nil)),
		)

		It("does not come after SUB", func() {
			p := connect(&cfg).send(sub())
			p.heard()
			p.send(identify(`{}`))
			Expect(p.heard()).To(Equal([]string{"error E_INVALID IDENTIFY after SUB"}))
			Expect(p.ended()).To(Equal("E_INVALID"))
		})

		It("that switches heartbeats off is not for consumers", func() {
			p := connect(&cfg).send(identify(`{"heartbeat_interval":-1}`)).send(pub("b"))
			Expect(p.heard()).To(Equal([]string{"response OK", "response OK"}))
			p.send(sub())
			Expect(p.heard()).To(Equal([]string{"error E_INVALID SUB with heartbeats switched off"}))
			Expect(p.did()).To(HaveLen(2))
		})

		It("moves the heartbeats of one that is on its way", func() {
			p := connect(&cfg).send(identify(`{"heartbeat_interval":30000}`))
			p.at(20 * second)
			p.send(identify(`{"heartbeat_interval":1000}`))
			p.heard()
			p.at(21 * second)
			Expect(p.heard()).To(Equal([]string{"response _heartbeat_"}))
		})
	})

	Describe("publishing", func() {
		It("is allowed at any time, and answered in order", func() {
			p := connect(&cfg)
			for _, before := range [][]byte{nil, sub(), wire.AppendRdy(nil, 1), []byte("CLS\n")} {
				p.send(before)
				p.heard()
				p.did()
				p.send(pub("one"))
				p.send(wire.AppendMpub(nil, "t", [][]byte{[]byte("two"), []byte("three")}))
				p.send(wire.AppendPub([]byte("D"), "t 1500", []byte("four")))
				Expect(p.did()).To(Equal([]string{
					`PUB topic=t body="one"`,
					`MPUB topic=t message="two" message="three"`,
					`DPUB topic=t body="four" defer=1.5s`,
				}))
				Expect(p.heard()).To(Equal([]string{"response OK", "response OK", "response OK"}))
			}
		})

		DescribeTable("continues after a refusal that is not fatal",
			func(refusal *wire.Error, frame string) {
				p := connect(&cfg)
				p.outcome = func(op *session.Op) error {
					if string(op.Body) == "no" {
						return fmt.Errorf("publish: %w", refusal)
					}
					return nil
				}
				p.send(append(append(pub("yes"), pub("no")...), pub("yes")...))
				Expect(p.heard()).To(Equal([]string{"response OK", "error " + frame, "response OK"}))
				Expect(p.ended()).To(BeEmpty())
			},
			Entry(nil, wire.RateLimited(20*time.Millisecond), "E_RATE_LIMITED retry_after_ms=20"),
			Entry(nil, wire.NewError(wire.CodeQueueFull, "topic t is full"), "E_QUEUE_FULL topic t is full"),
		)

		It("may be answered late, and replies still come in the order of the commands", func() {
			p := connect(&cfg)
			p.late = true
			p.outcome = func(op *session.Op) error {
				if string(op.Body) == "no" {
					return wire.RateLimited(0)
				}
				return nil
			}
			p.send(append(pub("a"), pub("no")...))
			p.send([]byte("BOGUS\n"))
			Expect(p.ended()).To(BeEmpty(), "the refusal waits for its turn")
			Expect(p.s.Output()).To(BeEmpty())
			Expect(p.s.Need()).To(BeZero())
			p.send(pub("c"))
			Expect(p.s.Need()).To(BeZero())
			n, op := p.s.Step(pub("c"), 0)
			Expect(n).To(BeZero(), "not even by a driver that dropped the refused command")
			Expect(op.Kind).To(Equal(session.OpNone))
			Expect(p.waiting).To(HaveLen(2), "nothing is read after a refusal")
			p.settle()
			Expect(p.heard()).To(Equal([]string{"response OK", "error E_RATE_LIMITED retry_after_ms=0", `error E_INVALID unknown command "BOGUS"`}))
			Expect(p.ended()).To(Equal("E_INVALID"))
		})

		It("answers nothing after a fatal failure, however many wait", func() {
			p := connect(&cfg)
			p.late = true
			p.outcome = func(op *session.Op) error {
				if string(op.Body) == "no" {
					return errors.New("disk on fire")
				}
				return nil
			}
			p.send(append(append(pub("a"), pub("no")...), pub("c")...))
			p.settle()
			Expect(p.heard()).To(Equal([]string{"response OK", "error E_PUB_FAILED PUB failed"}))
			Expect(p.ended()).To(Equal("E_PUB_FAILED"))
		})
	})

	Describe("the driver's errors", func() {
		type verdict struct {
			command []byte
			frame   string
			fatal   bool
		}
		body := []byte("b")
		DescribeTable("get the code of their command, and keep their cause to themselves",
			func(v verdict) {
				cause := errors.New("secret detail")
				p := connect(&cfg)
				if v.command[0] != 'S' && v.command[0] != 'I' {
					p.send(sub())
					p.heard()
				}
				p.outcome = func(*session.Op) error { return cause }
				p.send(v.command)
				Expect(p.heard()).To(Equal([]string{"error " + v.frame}))
				closing, why := p.s.Closing()
				Expect(closing).To(Equal(v.fatal))
				if v.fatal {
					Expect(errors.Is(why, cause)).To(BeTrue())
				}
			},
			Entry("IDENTIFY", verdict{identify(`{}`), "E_IDENTIFY_FAILED IDENTIFY failed", true}),
			Entry("PUB", verdict{wire.AppendPub(nil, "t", body), "E_PUB_FAILED PUB failed", true}),
			Entry("MPUB", verdict{wire.AppendMpub(nil, "t", [][]byte{body}), "E_MPUB_FAILED MPUB failed", true}),
			Entry("DPUB", verdict{wire.AppendPub([]byte("D"), "t 0", body), "E_DPUB_FAILED DPUB failed", true}),
			Entry("SUB", verdict{sub(), "E_SUB_FAILED SUB failed", true}),
			Entry("RDY", verdict{wire.AppendRdy(nil, 1), "E_INVALID RDY failed", true}),
			Entry("CLS", verdict{[]byte("CLS\n"), "E_INVALID CLS failed", true}),
			Entry("FIN", verdict{wire.AppendFin(nil, id), "E_FIN_FAILED FIN " + testID + " failed", false}),
			Entry("REQ", verdict{[]byte("REQ " + testID + " 0\n"), "E_REQ_FAILED REQ " + testID + " failed", false}),
			Entry("TOUCH", verdict{[]byte("TOUCH " + testID + "\n"), "E_TOUCH_FAILED TOUCH " + testID + " failed", false}),
		)

		It("with a code of their own are sent as they are", func() {
			p := connect(&cfg)
			p.outcome = func(*session.Op) error { return wire.NewError(wire.CodeUnauthorized, "no right to topic t") }
			p.send(pub("b"))
			Expect(p.heard()).To(Equal([]string{"error E_UNAUTHORIZED no right to topic t"}))
			Expect(p.ended()).To(Equal("E_UNAUTHORIZED"))
		})
	})

	Describe("subscribing", func() {
		It("gives the acknowledgements to the driver without a reply", func() {
			p := connect(&cfg)
			Expect(p.s.Subscribed()).To(BeFalse())
			p.send(sub())
			Expect(p.heard()).To(Equal([]string{"response OK"}))
			Expect(p.s.Subscribed()).To(BeTrue())
			p.send(wire.AppendRdy(nil, 5))
			p.send(wire.AppendFin(nil, id))
			p.send([]byte("REQ " + testID + " 90000\n"))
			p.send([]byte("TOUCH " + testID + "\n"))
			p.send(wire.AppendRdy(nil, 0))
			Expect(p.did()).To(Equal([]string{
				"SUB topic=t channel=c",
				"RDY ready=5",
				"FIN id=" + testID,
				"REQ id=" + testID + " timeout=1m30s",
				"TOUCH id=" + testID,
				"RDY ready=0",
			}))
			Expect(p.heard()).To(BeEmpty())
		})

		It("may be tried again after a refusal that is not fatal", func() {
			p := connect(&cfg)
			p.outcome = func(*session.Op) error { return &wire.Error{Code: wire.CodeSubFailed, Text: "later"} }
			p.send(sub())
			Expect(p.heard()).To(Equal([]string{"error E_SUB_FAILED later"}))
			Expect(p.s.Subscribed()).To(BeFalse())
			p.outcome = nil
			p.send(sub())
			Expect(p.heard()).To(Equal([]string{"response OK"}))
			Expect(p.s.Subscribed()).To(BeTrue())
		})

		It("ends in order with CLS: RDY is ignored, FIN, REQ and TOUCH are not", func() {
			p := connect(&cfg).send(sub()).send([]byte("CLS\n"))
			Expect(p.heard()).To(Equal([]string{"response OK", "response CLOSE_WAIT"}))
			p.did()
			p.send(wire.AppendRdy(nil, 5)).send(wire.AppendFin(nil, id)).send([]byte("REQ " + testID + " 0\n")).send([]byte("TOUCH " + testID + "\n"))
			Expect(p.did()).To(Equal([]string{"FIN id=" + testID, "REQ id=" + testID, "TOUCH id=" + testID}))
			Expect(p.heard()).To(BeEmpty())
			Expect(p.s.Subscribed()).To(BeTrue())
			Expect(p.ended()).To(BeEmpty(), "the client hangs up, not the server")
		})
	})

	Describe("AUTH", func() {
		It("is refused where it is not enabled", func() {
			p := connect(&cfg).send([]byte("AUTH\n\x00\x00\x00\x01" + "s"))
			Expect(p.heard()).To(Equal([]string{"error E_AUTH_DISABLED AUTH is not enabled"}))
			Expect(p.ended()).To(Equal("E_AUTH_DISABLED"))
		})

		Context("when it is required", func() {
			BeforeEach(func() { cfg.AuthRequired = true })

			DescribeTable("must come before", func(command []byte) {
				p := connect(&cfg).send(command)
				Expect(p.did()).To(BeEmpty())
				Expect(p.ended()).To(Equal("E_AUTH_FIRST"))
			},
				Entry("PUB", pub("b")),
				Entry("MPUB", wire.AppendMpub(nil, "t", [][]byte{[]byte("b")})),
				Entry("DPUB", wire.AppendPub([]byte("D"), "t 0", []byte("b"))),
				Entry("SUB", sub()),
			)

			It("is announced to the client, checked by the driver, and opens the rest", func() {
				p := connect(&cfg)
				p.outcome = func(op *session.Op) error {
					if op.Kind == session.OpAuth {
						op.Reply = []byte(`{"identity":"me","permission_count":1}`)
					}
					return nil
				}
				p.send(identify(`{"feature_negotiation":true}`))
				Expect(p.heard()).To(ConsistOf(ContainSubstring(`"auth_required":true`)))
				p.send([]byte("AUTH\n\x00\x00\x00\x06" + "secret"))
				p.send(pub("b"))
				Expect(p.did()).To(Equal([]string{"IDENTIFY", `AUTH body="secret"`, `PUB topic=t body="b"`}))
				Expect(p.heard()).To(Equal([]string{`response {"identity":"me","permission_count":1}`, "response OK"}))
				p.send([]byte("AUTH\n\x00\x00\x00\x06" + "secret"))
				Expect(p.ended()).To(Equal("E_INVALID"))
			})

			It("closes when it fails", func() {
				p := connect(&cfg)
				p.outcome = func(*session.Op) error { return errors.New("no auth server") }
				p.send([]byte("AUTH\n\x00\x00\x00\x06" + "secret"))
				Expect(p.heard()).To(Equal([]string{"error E_AUTH_FAILED AUTH failed"}))
				Expect(p.ended()).To(Equal("E_AUTH_FAILED"))
			})
		})
	})

	Describe("heartbeats", func() {
		It("come every interval while the client answers", func() {
			p := connect(&cfg)
			Expect(p.s.Deadline()).To(Equal(30 * second))
			p.at(30*second - 1)
			Expect(p.heard()).To(BeEmpty())
			for i := mono.Time(1); i < 5; i++ {
				p.at(30 * i * second)
				Expect(p.heard()).To(Equal([]string{"response _heartbeat_"}))
				p.send(wire.AppendNop(nil))
			}
			Expect(p.ended()).To(BeEmpty())
			Expect(p.did()).To(BeEmpty())
		})

		It("end a client that sends nothing for two intervals, without a frame", func() {
			p := connect(&cfg)
			p.at(30 * second)
			Expect(p.heard()).To(Equal([]string{"response _heartbeat_"}))
			p.at(60*second - 1)
			Expect(p.ended()).To(BeEmpty())
			p.at(60 * second)
			Expect(p.heard()).To(BeEmpty())
			Expect(p.ended()).To(Equal("silent"))
			Expect(p.s.Deadline()).To(Equal(mono.Never))
			p.send(pub("late"))
			Expect(p.did()).To(BeEmpty())
		})

		It("count half a command as silence", func() {
			p := connect(&cfg)
			for t := mono.Time(1); t < 60; t++ {
				p.at(t * second)
				p.send([]byte("x"))
			}
			p.at(60 * second)
			Expect(p.ended()).To(Equal("silent"))
		})

		It("count any command as an answer", func() {
			p := connect(&cfg).at(30 * second).at(59 * second).send(pub("b"))
			p.at(118 * second)
			Expect(p.ended()).To(BeEmpty())
			p.at(119 * second)
			Expect(p.ended()).To(Equal("silent"))
		})

		It("do not count as silence what the driver reports as unread", func() {
			p := connect(&cfg).at(30 * second)
			p.s.Heard(59 * second)
			p.s.Heard(40 * second) // does not go back
			p.at(118 * second)
			Expect(p.ended()).To(BeEmpty())
			p.at(119 * second)
			Expect(p.ended()).To(Equal("silent"))
		})

		It("are not sent to a client that has not sent its protocol; the client is closed all the same", func() {
			p := newPeer(&cfg).at(30 * second)
			Expect(p.heard()).To(BeEmpty())
			p.at(60 * second)
			Expect(p.heard()).To(BeEmpty())
			Expect(p.ended()).To(Equal("silent"))
		})

		It("follow the interval of IDENTIFY from then on", func() {
			p := connect(&cfg)
			p.now = 10 * second
			p.send(identify(`{"heartbeat_interval":2000}`))
			p.heard()
			Expect(p.s.Deadline()).To(Equal(12 * second))
			p.at(12 * second)
			Expect(p.heard()).To(Equal([]string{"response _heartbeat_"}))
			p.at(14 * second)
			Expect(p.ended()).To(Equal("silent"))
		})

		It("can be disabled, and then silence is no fault", func() {
			p := connect(&cfg).send(identify(`{"heartbeat_interval":-1}`))
			p.heard()
			Expect(p.s.Deadline()).To(Equal(mono.Never))
			p.s.Tick(1e6 * second)
			Expect(p.heard()).To(BeEmpty())
			Expect(p.ended()).To(BeEmpty())
		})

		It("that are late do not pile up, and the server's own pause is not held against the client", func() {
			p := connect(&cfg)
			p.s.Tick(100 * second)
			Expect(p.heard()).To(Equal([]string{"response _heartbeat_"}))
			p.at(130*second - 1)
			Expect(p.ended()).To(BeEmpty(), "70 s of the 100 were the pause")
			p.at(130 * second)
			Expect(p.ended()).To(Equal("silent"))
		})

		It("are not sent by a tick that is too early", func() {
			p := connect(&cfg)
			p.s.Tick(30*second - 1)
			Expect(p.heard()).To(BeEmpty())
			Expect(p.s.Deadline()).To(Equal(30 * second))
		})
	})

	Describe("the end", func() {
		It("is final: nothing is read, answered or ticked after it", func() {
			p := connect(&cfg).send([]byte("BOGUS\n"))
			Expect(p.heard()).To(Equal([]string{`error E_INVALID unknown command "BOGUS"`}))
			left := len(p.buf)
			p.send(pub("b"))
			Expect(p.buf).To(HaveLen(left+len(pub("b"))), "the refused command is not consumed")
			p.s.Tick(1e6 * second)
			Expect(p.heard()).To(BeEmpty())
			Expect(p.ended()).To(Equal("E_INVALID"))
		})
	})

	Describe("the driver's side of the contract", func() {
		It("may answer FINs together, in order", func() {
			p := connect(&cfg)
			_, op := p.s.Step(sub(), 0)
			p.s.Done(op, nil)
			in := wire.AppendFin(wire.AppendFin(nil, wire.MessageID{'1'}), wire.MessageID{'2'})
			n, first := p.s.Step(in, 0)
			_, second := p.s.Step(in[n:], 0)
			Expect(first.Kind).To(Equal(session.OpFin))
			Expect(second.Kind).To(Equal(session.OpFin))
			p.s.Done(first, errors.New("no"))
			p.s.Done(second, nil)
			Expect(p.heard()).To(Equal([]string{"response OK", fmt.Sprintf("error E_FIN_FAILED FIN %v failed", wire.MessageID{'1'})}))
		})

		It("is to answer anything but a publish or a FIN before the next Step", func() {
			p := connect(&cfg)
			in := append(sub(), wire.AppendNop(nil)...)
			n, op := p.s.Step(in, 0)
			Expect(op.Kind).To(Equal(session.OpSub))
			Expect(func() { p.s.Step(in[n:], 0) }).To(PanicWith(ContainSubstring("waits for Done")))
			p.s.Done(op, nil)
			n, op = p.s.Step(in[n:], 0)
			Expect(n).To(Equal(4))
			Expect(op.Kind).To(Equal(session.OpNone))
		})

		It("is to answer that one too, not only the publishes before it", func() {
			p := connect(&cfg)
			_, first := p.s.Step(pub("b"), 0)
			_, last := p.s.Step(sub(), 0)
			p.s.Done(first, nil)
			Expect(func() { p.s.Step(wire.AppendNop(nil), 0) }).To(PanicWith(ContainSubstring("waits for Done")))
			p.s.Done(last, nil)
			n, _ := p.s.Step(wire.AppendNop(nil), 0)
			Expect(n).To(Equal(4))
			Expect(p.heard()).To(Equal([]string{"response OK", "response OK"}))
		})

		It("is to answer what was given out, once", func() {
			p := connect(&cfg)
			n, op := p.s.Step(pub("b"), 0)
			Expect(n).To(Equal(len(pub("b"))))
			p.s.Done(op, nil)
			Expect(func() { p.s.Done(op, nil) }).To(PanicWith(ContainSubstring("Done of PUB with 0 operations outstanding")))
			Expect(func() { p.s.Done(session.Op{}, nil) }).To(PanicWith(ContainSubstring("Done of none")))
		})
	})
})
