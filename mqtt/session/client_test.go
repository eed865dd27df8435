package session_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/mqtt/names"
	"github.com/srtm-io/srtm/mqtt/session"
	nsq "github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
)

const testRules = `
[[mqtt]]
filter = "fleet/+/telemetry"
topic = "telemetry"
publisher = "{1}"

[[mqtt]]
filter = "events/+"
topic = "events"
envelope = "cloudevents"

[[mqtt]]
filter = "tenants/+/#"
topic = "tenant-{1}"
publisher = "{1}"
`

// parsed saves fuzzing from parsing the rules of each session.
var parsed = map[string]*names.Rules{}

func rulesOf(t interface{ Fatal(...any) }, text string) *names.Rules {
	if rules := parsed[text]; rules != nil {
		return rules
	}
	rules, err := names.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	parsed[text] = rules
	return rules
}

// Encoding of packets as a client sends them, on its own: a mistake of the session's codec must not hide.

func packet(first byte, fields ...[]byte) []byte {
	body := join(fields...)
	return join([]byte{first}, varint(len(body)), body)
}

func join(parts ...[]byte) (all []byte) {
	for _, p := range parts {
		all = append(all, p...)
	}
	return all
}

func varint(v int) (b []byte) {
	for v >= 128 {
		b, v = append(b, byte(v%128+128)), v/128
	}
	return append(b, byte(v))
}

func text(s string) []byte { return join(number16(len(s)), []byte(s)) }

func number16(v int) []byte { return binary.BigEndian.AppendUint16(nil, uint16(v)) }

func number32(v int) []byte { return binary.BigEndian.AppendUint32(nil, uint32(v)) }

// sized returns the properties of a packet, which only 5.0 has.
func sized(version byte, properties ...[]byte) []byte {
	if version < 5 {
		return nil
	}
	all := join(properties...)
	return join(varint(len(all)), all)
}

// arguments are the words of a command: plain words and key=value.
type arguments struct {
	plain []string
	named map[string]string
}

func argumentsOf(words []string) arguments {
	a := arguments{named: map[string]string{}}
	for _, w := range words {
		if key, value, found := strings.Cut(w, "="); found {
			a.named[key] = value
		} else {
			a.plain = append(a.plain, w)
		}
	}
	return a
}

func (a *arguments) has(key string) bool {
	_, ok := a.named[key]
	for _, p := range a.plain {
		ok = ok || p == key
	}
	return ok
}

func (a *arguments) number(key string) int {
	n, _ := strconv.Atoi(a.named[key])
	return n
}

// property returns a property if the arguments have the key.
func (a *arguments) property(key string, id byte, size int) []byte {
	if !a.has(key) {
		return nil
	}
	switch size {
	case 1:
		return []byte{id, byte(a.number(key))}
	case 2:
		return join([]byte{id}, number16(a.number(key)))
	}
	return join([]byte{id}, number32(a.number(key)))
}

// encode returns the packet of a client's command.
func encode(version byte, words []string) ([]byte, bool) {
	a := argumentsOf(words[1:])
	flag := func(key string, bit byte) byte {
		if a.has(key) {
			return bit
		}
		return 0
	}
	switch words[0] {
	case "connect":
		flags := flag("clean", 2) | flag("user", 128) | flag("password", 64)
		var will []byte
		if a.has("will") {
			will = join(sized(version, a.property("delay", 24, 4)), text(a.named["will"]), text(a.named["payload"]))
			flags |= 4 | byte(a.number("willqos"))<<3 | flag("willretain", 32)
		}
		var user []byte
		if a.has("user") {
			user = text(a.named["user"])
		}
		if a.has("password") {
			user = join(user, text(a.named["password"]))
		}
		var redirect []byte
		if a.has("redirect") {
			redirect = join([]byte{38}, text("srtm-redirect"), text("1"))
		}
		properties := sized(version, a.property("expiry", 17, 4), a.property("receive", 33, 2), a.property("maximum", 39, 4), a.property("problems", 23, 1), redirect)
		return packet(0x10, text("MQTT"), []byte{version, flags}, number16(a.number("keepalive")), properties, text(a.named["id"]), will, user), true
	case "publish":
		first := 0x30 | byte(a.number("qos"))<<1 | flag("dup", 8) | flag("retain", 1)
		var id []byte
		if a.number("qos") > 0 {
			id = number16(a.number("id"))
		}
		var user []byte
		for range a.number("users") {
			user = join(user, []byte{38}, text("k"), text("v"))
		}
		for _, p := range []struct {
			key string
			id  byte
		}{{"content", 3}, {"response", 8}, {"correlation", 9}} {
			if a.has(p.key) {
				user = join(user, []byte{p.id}, text(a.named[p.key]))
			}
		}
		user = join(user, a.property("message-expiry", 2, 4))
		return packet(first, text(a.named["topic"]), id, sized(version, a.property("alias", 35, 2), user), []byte(a.named["payload"])), true
	case "subscribe", "unsubscribe":
		var filters []byte
		for _, p := range a.plain {
			filter, options, _ := strings.Cut(p, ":")
			filters = join(filters, text(filter))
			if words[0] == "subscribe" {
				n, _ := strconv.Atoi(options)
				filters = append(filters, byte(n))
			}
		}
		first, properties := byte(0xa2), sized(version)
		if words[0] == "subscribe" {
			first = 0x82
			if a.has("subscription") {
				properties = sized(version, []byte{11}, varint(a.number("subscription")))
			}
		}
		return packet(first, number16(a.number("id")), properties, filters), true
	case "puback":
		if a.has("reason") {
			return packet(0x40, number16(a.number("id")), []byte{byte(a.number("reason"))}), true
		}
		return packet(0x40, number16(a.number("id"))), true
	case "ping":
		return []byte{0xc0, 0}, true
	case "disconnect":
		switch {
		case a.has("expiry"):
			return packet(0xe0, []byte{byte(a.number("reason"))}, sized(5, a.property("expiry", 17, 4))), true
		case a.has("reason"):
			return packet(0xe0, []byte{byte(a.number("reason"))}), true
		}
		return packet(0xe0), true
	}
	return nil, false
}

// peer is a small real driver. It feeds a session, carries out the operations by outcome, and records all
// effects.
type peer struct {
	s   *session.Session
	now mono.Time
	buf []byte

	// outcome decides an operation. nil means that all operations succeed.
	outcome func(op *nsq.Op) error
	// late makes publishes wait for their Answer until another operation comes, or settle is called.
	late    bool
	waiting []nsq.Op

	ops           []string
	out           []byte
	lastAttribute []byte // of the last publish
}

func newPeer(t interface{ Fatal(...any) }, cfg *session.Config, rules string, secure bool) *peer {
	p := &peer{s: session.New(cfg, rulesOf(t, rules), secure, 0)}
	p.s.UseTime(published)
	return p
}

// published is the wall time of all sessions and messages.
const published = 1_700_000_000_000_000_000

// send gives bytes to the session and runs the session until it needs more bytes.
func (p *peer) send(b []byte) *peer {
	p.buf = append(p.buf, b...)
	var op nsq.Op
	for {
		n := p.s.StepInto(p.buf, p.now, &op)
		if op.Kind != nsq.OpNone {
			p.ops = append(p.ops, describe(&op))
			if op.Kind == nsq.OpPub {
				p.lastAttribute = append([]byte(nil), op.MQTT.Attribute...)
			}
			if p.late && op.Kind == nsq.OpPub {
				p.waiting = append(p.waiting, nsq.Op{Kind: op.Kind, Packet: op.Packet})
			} else {
				p.settle()
				p.answer(&op)
			}
		}
		p.buf = p.buf[n:]
		if n == 0 && op.Kind == nsq.OpNone {
			break
		}
	}
	if !p.late {
		p.take()
	}
	return p
}

// settle answers the waiting publishes.
func (p *peer) settle() {
	for i := range p.waiting {
		p.answer(&p.waiting[i])
	}
	p.waiting = nil
}

func (p *peer) answer(op *nsq.Op) {
	var err error
	if p.outcome != nil {
		err = p.outcome(op)
	}
	if op.Kind == nsq.OpConnect && op.MQTT.Connect.ClientID == "" {
		op.MQTT.Connect.ClientID = "assigned"
	}
	p.s.Answer(op, err)
}

func (p *peer) take() {
	p.out = append(p.out, p.s.Output()...)
	p.s.ClearOutput()
}

// packets returns the session's packets since the last call, in hexadecimal.
func (p *peer) packets() (all []string) {
	p.take()
	for len(p.out) > 0 {
		length, at := 0, 1
		for ; ; at++ {
			length += int(p.out[at]&127) << (7 * (at - 1))
			if p.out[at] < 128 {
				break
			}
		}
		name := [...]string{2: "CONNACK", 3: "PUBLISH", 4: "PUBACK", 9: "SUBACK", 11: "UNSUBACK", 13: "PINGRESP", 14: "DISCONNECT", 15: ""}[p.out[0]>>4]
		all = append(all, fmt.Sprintf("%s % x", name, p.out[:at+1+length]))
		p.out = p.out[at+1+length:]
	}
	return all
}

// did returns the operations since the last call.
func (p *peer) did() []string {
	o := p.ops
	p.ops = nil
	return o
}

// ended is "" while the session is open.
func (p *peer) ended() string {
	closing, cause := p.s.Closing()
	var e *session.Error
	switch {
	case !closing && cause == nil:
		return ""
	case closing && cause == nil:
		return "disconnected by the client"
	case errors.As(cause, &e):
		return e.Error()
	}
	return fmt.Sprintf("closing=%v cause=%v", closing, cause)
}

// at moves the clock to t after the start, and ticks at every deadline on the way.
func (p *peer) at(t mono.Time) *peer {
	for d := p.s.Deadline(); d <= t; d = p.s.Deadline() {
		p.now = d
		p.s.Tick(d)
	}
	p.now = t
	return p
}

func describe(op *nsq.Op) string {
	var b strings.Builder
	b.WriteString(op.Kind.String())
	if op.Packet != 0 {
		fmt.Fprintf(&b, " packet=%d", op.Packet)
	}
	if len(op.Topic) > 0 {
		fmt.Fprintf(&b, " topic=%s", op.Topic)
	}
	if len(op.Body) > 0 {
		fmt.Fprintf(&b, " body=%q", op.Body)
	}
	if op.ID != (wire.MessageID{}) {
		fmt.Fprintf(&b, " id=%s source=%d", op.ID, op.MQTT.Source)
	}
	x := op.MQTT
	switch op.Kind {
	case nsq.OpPub:
		fmt.Fprintf(&b, " attribute=%q", x.Attribute)
		if len(x.Publisher) > 0 {
			fmt.Fprintf(&b, " publisher=%s", x.Publisher)
		}
		if x.Retain {
			b.WriteString(" retain")
		}
		if x.Dropped {
			b.WriteString(" dropped")
		}
	case nsq.OpConnect:
		c := *x.Connect
		will := c.Will
		c.Will = nil
		fmt.Fprintf(&b, " %+v", c)
		if will != nil {
			fmt.Fprintf(&b, " will %s attribute=%q publisher=%q body=%q qos=%d delay=%v", will.Topic, will.Attribute, will.Publisher, will.Body, will.QoS, will.Delay)
		}
	case nsq.OpSubscribe, nsq.OpUnsubscribe:
		if x.Refusal != "" {
			fmt.Fprintf(&b, " refusal=%q", x.Refusal)
		}
		for _, f := range x.Filters {
			fmt.Fprintf(&b, "\n  %q", f.Filter)
			if f.Reason != 0 {
				fmt.Fprintf(&b, " reason=0x%02x", f.Reason)
			}
			if op.Kind == nsq.OpSubscribe {
				fmt.Fprintf(&b, " share=%q channel=%s topics=%q qos=%d", f.Share, f.Channel, f.Topics, f.QoS)
			}
			if f.ID != 0 {
				fmt.Fprintf(&b, " id=%d", f.ID)
			}
			if f.NoLocal {
				b.WriteString(" nolocal")
			}
		}
	case nsq.OpDisconnect:
		fmt.Fprintf(&b, " will=%v expiry=%v", x.PublishWill, x.SessionExpiry)
	}
	return b.String()
}

func smallConfig() session.Config {
	cfg := session.DefaultConfig()
	cfg.MaxPacketSize, cfg.MaxInflight, cfg.MaxFilters, cfg.MaxSources, cfg.MaxAliases = 1<<10, 3, 4, 5, 2
	cfg.MaxSessionExpiry = time.Hour
	return cfg
}

// Scenarios of testdata. A command of the client is encoded for the version of its session; `raw` sends
// hexadecimal digits. The result of a step is the operations for the driver, the packets for the client,
// and the end of the session.
//
//	begin 5|4 [secure]      a new session, whose driver accepts all operations
//	fail CODE               the next operation fails with an error of this code
//	message TOPIC CHANNEL   AppendMessage with body=, id=, name=, attempts=, source=, flags; attribute: of the last publish
//	at DURATION             the clock
//	server REASON [REFERENCE]
//	kept FILTER...          the driver finds a kept session with these filters at the next CONNECT
//	rules                   the rules become empty
//	wall DURATION           the wall time, from the time at which all messages are published
func TestScenarios(t *testing.T) {
	testkit.Scenarios(t, "*.txt", func(t *testing.T) func([]string) (string, error) {
		s := &script{t: t}
		return func(words []string) (string, error) {
			s.results.Reset()
			err := s.run(words)
			for _, line := range append(s.p.did(), s.p.packets()...) {
				s.results.WriteString(line + "\n")
			}
			if e := s.p.ended(); e != s.ended {
				fmt.Fprintf(&s.results, "closing: %s\n", e)
				s.ended = e
			}
			return s.results.String(), err
		}
	})
}

type script struct {
	t       *testing.T
	p       *peer
	version byte
	ended   string
	results strings.Builder
}

func (s *script) run(words []string) error {
	a := argumentsOf(words[1:])
	switch words[0] {
	case "begin":
		cfg := smallConfig()
		s.version, s.ended = words[1][0]-'0', ""
		s.p = newPeer(s.t, &cfg, testRules, a.has("secure"))
		s.p.send(nil)
	case "raw":
		b, err := parseHex(strings.Join(words[1:], ""))
		if err != nil {
			return err
		}
		s.p.send(b)
	case "fail":
		s.p.outcome = func(*nsq.Op) error {
			s.p.outcome = nil
			if words[1] == "E_RATE_LIMITED" {
				return wire.RateLimited(5 * time.Millisecond)
			}
			if reason, err := strconv.ParseUint(words[1], 0, 8); err == nil {
				return &session.Error{Reason: session.Reason(reason), Text: "refused", ServerReference: a.named["reference"]}
			}
			return wire.NewError(wire.ErrorCode(words[1]), "refused")
		}
	case "failfilter":
		s.p.outcome = func(op *nsq.Op) error {
			s.p.outcome = nil
			op.MQTT.Filters[0].Reason = byte(session.ReasonOf(wire.NewError(wire.ErrorCode(words[1]), "")))
			return nil
		}
	case "kept":
		s.p.outcome = func(op *nsq.Op) error {
			s.p.outcome = nil
			op.MQTT.Connect.Present = true
			var kept []nsq.Filter
			for _, f := range words[1:] {
				kept = append(kept, nsq.Filter{Filter: f, Channel: "mqtt.kept", QoS: 1})
			}
			s.p.s.Restore(kept)
			return nil
		}
	case "show":
		for _, f := range s.p.s.Subscriptions() {
			fmt.Fprintf(&s.results, "%q share=%q channel=%s topics=%q\n", f.Filter, f.Share, f.Channel, f.Topics)
		}
		fmt.Fprintf(&s.results, "window %d, restricted %v, version %d, client %q\n", s.p.s.Window(), s.p.s.Restricted(), s.p.s.Version(), s.p.s.Identity().ClientID)
	case "wall":
		d, err := time.ParseDuration(words[1])
		if err != nil {
			return err
		}
		s.p.s.UseTime(published + mono.Wall(d))
	case "rules":
		s.p.s.UseRules(&names.Rules{})
	case "message":
		m := wire.Message{Timestamp: published, Attempts: uint16(max(1, a.number("attempts"))), Body: []byte(a.named["body"])}
		copy(m.ID[:], "000000000000000"+a.named["id"])
		var attribute []byte
		if a.has("name") {
			attribute = names.Attribute{Name: []byte(a.named["name"]), Envelope: a.has("envelope"), AtMostOnce: a.has("qos0")}.Append(nil)
			if a.has("own") {
				attribute = names.Attribute{Name: []byte(a.named["name"]), Origin: names.OriginOf(s.p.s.Identity().ClientID)}.Append(nil)
			}
			if a.has("attribute") {
				attribute = s.p.lastAttribute
			}
			if a.has("envelope") {
				m.Body = names.AppendEnvelope(nil, &names.Event{Name: []byte(a.named["name"]), Payload: m.Body})
			}
		}
		source := session.Source{Topic: a.plain[0], Channel: a.plain[1], Number: uint16(a.number("source"))}
		out, outcome := s.p.s.AppendMessage(nil, &source, &m, attribute)
		fmt.Fprintf(&s.results, "%s\n", [...]string{"unwanted", "too large", "blocked", "sent once", "sent"}[outcome])
		s.p.out = append(s.p.out, out...)
	case "at":
		d, err := time.ParseDuration(words[1])
		if err != nil {
			return err
		}
		s.p.at(mono.Time(d))
	case "server":
		reason, err := strconv.ParseUint(words[1], 0, 8)
		if err != nil {
			return err
		}
		s.p.s.Disconnect(&session.Error{Reason: session.Reason(reason), Text: "bye", ServerReference: a.named["reference"]})
	default:
		b, ok := encode(s.version, words)
		if !ok {
			return fmt.Errorf("unknown command %q", words[0])
		}
		s.p.send(b)
	}
	return nil
}

func parseHex(digits string) ([]byte, error) {
	var b []byte
	for i := 0; i+1 < len(digits); i += 2 {
		v, err := strconv.ParseUint(digits[i:i+2], 16, 8)
		if err != nil {
			return nil, err
		}
		b = append(b, byte(v))
	}
	return b, nil
}
