package session_test

import (
	"fmt"
	"strings"
	"testing"
	"time"
	"unsafe"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
)

// The states of a conversation that the rules distinguish.
const (
	fresh      = "fresh"      // only the magic was sent
	talking    = "talking"    // some command was sent, no SUB
	subscribed = "subscribed" // SUB was sent
	closing    = "closing"    // CLS was sent
)

// rule is the effect of one command in one state: the code of a refusal, or whether the driver gets the command, the
// answer to the client, and the next state.
type rule struct {
	code  string
	op    bool
	reply string
	next  string
}

// beforeSub has the rules of a client without a subscription.
var beforeSub = map[string]rule{
	"IDENTIFY": {op: true, reply: "OK", next: talking},
	"AUTH":     {code: "E_AUTH_DISABLED"},
	"PUB":      {op: true, reply: "OK", next: talking},
	"MPUB":     {op: true, reply: "OK", next: talking},
	"DPUB":     {op: true, reply: "OK", next: talking},
	"SUB":      {op: true, reply: "OK", next: subscribed},
	"RDY":      {code: "E_INVALID"},
	"FIN":      {code: "E_INVALID"},
	"REQ":      {code: "E_INVALID"},
	"TOUCH":    {code: "E_INVALID"},
	"NOP":      {next: talking},
	"CLS":      {code: "E_INVALID"},
}

// rules is the complete state machine of the protocol.
var rules = map[string]map[string]rule{
	fresh:   beforeSub,
	talking: beforeSub,
	subscribed: {
		"IDENTIFY": {code: "E_INVALID"},
		"AUTH":     {code: "E_AUTH_DISABLED"},
		"PUB":      {op: true, reply: "OK", next: subscribed},
		"MPUB":     {op: true, reply: "OK", next: subscribed},
		"DPUB":     {op: true, reply: "OK", next: subscribed},
		"SUB":      {code: "E_INVALID"},
		"RDY":      {op: true, next: subscribed},
		"FIN":      {op: true, next: subscribed},
		"REQ":      {op: true, next: subscribed},
		"TOUCH":    {op: true, next: subscribed},
		"NOP":      {next: subscribed},
		"CLS":      {op: true, reply: "CLOSE_WAIT", next: closing},
	},
	closing: {
		"IDENTIFY": {code: "E_INVALID"},
		"AUTH":     {code: "E_AUTH_DISABLED"},
		"PUB":      {op: true, reply: "OK", next: closing},
		"MPUB":     {op: true, reply: "OK", next: closing},
		"DPUB":     {op: true, reply: "OK", next: closing},
		"SUB":      {code: "E_INVALID"},
		"RDY":      {next: closing},
		"FIN":      {op: true, next: closing},
		"REQ":      {op: true, next: closing},
		"TOUCH":    {op: true, next: closing},
		"NOP":      {next: closing},
		"CLS":      {code: "E_INVALID"},
	},
}

var verbs = []string{"IDENTIFY", "AUTH", "PUB", "MPUB", "DPUB", "SUB", "RDY", "FIN", "REQ", "TOUCH", "NOP", "CLS"}

// command returns a well-formed command.
func command(verb string) []byte {
	switch verb {
	case "IDENTIFY":
		return wire.AppendIdentify(nil, []byte(`{"client_id":"c"}`))
	case "AUTH":
		return []byte("AUTH\n\x00\x00\x00\x06" + "secret")
	case "PUB":
		return wire.AppendPub(nil, "t", []byte("b"))
	case "MPUB":
		return wire.AppendMpub(nil, "t", [][]byte{[]byte("b"), []byte("c")})
	case "DPUB":
		return wire.AppendPub([]byte("D"), "t 1000", []byte("b"))
	case "SUB":
		return wire.AppendSub(nil, "t", "c")
	case "RDY":
		return wire.AppendRdy(nil, 3)
	case "FIN":
		return wire.AppendFin(nil, id)
	case "REQ":
		return []byte("REQ " + testID + " 1000\n")
	case "TOUCH":
		return []byte("TOUCH " + testID + "\n")
	case "NOP":
		return wire.AppendNop(nil)
	case "CLS":
		return []byte("CLS\n")
	}
	panic("no such verb: " + verb)
}

// obey sends verb to p and compares the effects with the rule.
func obey(p *peer, verb string, r rule) error {
	in := command(verb)
	p.send(in)
	ops, frames := p.did(), p.heard()
	if r.code != "" {
		if len(ops) != 0 || len(frames) != 1 || !strings.HasPrefix(frames[0], "error "+r.code+" ") || p.ended() != r.code {
			return fmt.Errorf("%s: ops %q, frames %q, ended %q, want %s", verb, ops, frames, p.ended(), r.code)
		}
		if len(p.buf) != len(in) {
			return fmt.Errorf("%s: %d of its %d bytes are left after the refusal", verb, len(p.buf), len(in))
		}
		return nil
	}
	if p.ended() != "" || len(p.buf) != 0 {
		return fmt.Errorf("%s: ended %q, %d bytes left", verb, p.ended(), len(p.buf))
	}
	if got := len(ops) == 1 && strings.HasPrefix(ops[0], verb); got != r.op || len(ops) > 1 {
		return fmt.Errorf("%s: ops %q, want one: %v", verb, ops, r.op)
	}
	want := []string{}
	if r.reply != "" {
		want = append(want, "response "+r.reply)
	}
	if fmt.Sprint(frames) != fmt.Sprint(want) {
		return fmt.Errorf("%s: frames %q, want %q", verb, frames, want)
	}
	return nil
}

func TestEveryCommandInEveryPlace(t *testing.T) {
	ways := map[string][]string{fresh: {}, talking: {"NOP"}, subscribed: {"SUB"}, closing: {"SUB", "CLS"}}
	for place, way := range ways {
		for _, verb := range verbs {
			t.Run(place+"/"+verb, func(t *testing.T) {
				cfg := session.DefaultConfig()
				p := connect(&cfg)
				for _, v := range way {
					p.send(command(v))
				}
				p.did()
				p.heard()
				testkit.NoError(t, obey(p, verb, rules[place][verb]))
			})
		}
	}
}

func TestRulesHoldInAnyOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := session.DefaultConfig()
		p := connect(&cfg)
		place := fresh
		for _, verb := range rapid.SliceOfN(rapid.SampledFrom(verbs), 1, 30).Draw(t, "verbs") {
			r := rules[place][verb]
			if err := obey(p, verb, r); err != nil {
				t.Fatalf("in %s: %v", place, err)
			}
			if got, want := p.s.Subscribed(), r.next == subscribed || r.next == closing || r.code != "" && (place == subscribed || place == closing); got != want {
				t.Fatalf("after %s in %s: Subscribed is %v", verb, place, got)
			}
			if r.code != "" {
				return
			}
			place = r.next
		}
	})
}

// A client is closed exactly two intervals after its last command. Until then it gets a heartbeat every interval,
// whenever the client sends commands.
func TestHeartbeatsForAnyRhythm(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := session.DefaultConfig()
		interval := mono.Time(rapid.IntRange(1000, 60000).Draw(t, "interval_ms")) * mono.Time(time.Millisecond)
		p := connect(&cfg).send(wire.AppendIdentify(nil, fmt.Appendf(nil, `{"heartbeat_interval":%d}`, int64(interval)/1e6)))
		p.heard()
		beats, last, now := 0, mono.Time(0), mono.Time(0)
		for _, gap := range rapid.SliceOfN(rapid.Int64Range(0, 3*int64(interval)), 1, 20).Draw(t, "gaps") {
			now += mono.Time(gap)
			for p.s.Deadline() <= now {
				p.now = p.s.Deadline()
				p.s.Tick(p.now)
				if p.s.Deadline() <= p.now {
					t.Fatalf("at %d: a tick left the deadline at %d", p.now, p.s.Deadline())
				}
				for _, f := range p.heard() {
					if beats++; f != "response _heartbeat_" || p.now != interval*mono.Time(beats) {
						t.Fatalf("at %d: %q, heartbeat %d of every %d", p.now, f, beats, interval)
					}
				}
				if p.ended() != "" {
					break
				}
			}
			if silent := now >= last+2*interval; silent != (p.ended() == "silent") {
				t.Fatalf("at %d, last command at %d: ended %q", now, last, p.ended())
			}
			if p.ended() != "" {
				testkit.MustEqual(t, p.now, last+2*interval, "closed at, with the last command at %d", last)
				return
			}
			p.now = now
			p.send(wire.AppendNop(nil))
			last = now
		}
	})
}

func TestConfigValidate(t *testing.T) {
	cfg := session.DefaultConfig()
	if err := cfg.Validate(); err != nil {
		t.Fatalf("the defaults: %v", err)
	}
	for name, spoil := range map[string]func(c *session.Config){
		"--max-msg-size":              func(c *session.Config) { c.Limits.MaxMessageSize = 0 },
		"--max-rdy-count":             func(c *session.Config) { c.Limits.MaxRdy = 0 },
		"heartbeat interval 1m1s":     func(c *session.Config) { c.HeartbeatInterval = 61 * time.Second },
		"heartbeat interval 1ms":      func(c *session.Config) { c.HeartbeatInterval = time.Millisecond },
		"--max-heartbeat-interval":    func(c *session.Config) { c.MaxHeartbeatInterval = time.Millisecond },
		"--msg-timeout 0s":            func(c *session.Config) { c.MsgTimeout = 0 },
		"--msg-timeout 1h":            func(c *session.Config) { c.MsgTimeout = time.Hour },
		"--max-msg-timeout":           func(c *session.Config) { c.MaxMsgTimeout = 0 },
		"output buffer size of 63":    func(c *session.Config) { c.OutputBufferSize = 63 },
		"output buffer size of 65537": func(c *session.Config) { c.OutputBufferSize = 65537 },
		"--max-output-buffer-size":    func(c *session.Config) { c.MaxOutputBufferSize = 0 },
		"--output-buffer-timeout 1ms": func(c *session.Config) { c.OutputBufferTimeout = time.Millisecond },
		"--output-buffer-timeout 31s": func(c *session.Config) { c.OutputBufferTimeout = 31 * time.Second },
		"--min-output-buffer-timeout": func(c *session.Config) { c.MinOutputBufferTimeout = 0 },
		"--max-output-buffer-timeout": func(c *session.Config) { c.MaxOutputBufferTimeout = 0 },
		"--max-deflate-level":         func(c *session.Config) { c.MaxDeflateLevel = 10 },
		"--tls-required":              func(c *session.Config) { c.TLSRequired = true },
	} {
		c := session.DefaultConfig()
		spoil(&c)
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	err := (&session.Config{}).Validate()
	if err == nil || strings.Count(err.Error(), "\n") < 8 {
		t.Errorf("an empty config has more faults than %v", err)
	}
}

func TestOpKindStrings(t *testing.T) {
	seen := map[string]bool{}
	for k := session.OpIdentify; k <= session.OpDeflate; k++ {
		s := k.String()
		if seen[s] || s == "" || s == "none" {
			t.Errorf("kind %d is %q", k, s)
		}
		seen[s] = true
	}
	if session.OpNone.String() != "none" || len(seen) != len(verbs)+7 { // three upgrades and four operations of MQTT
		t.Errorf("OpNone is %q, %d kinds", session.OpNone, len(seen))
	}
}

// The test bounds the memory of one idle session. The whole budget of an idle connection is 3,000 bytes.
func TestSessionIsSmall(t *testing.T) {
	if got := unsafe.Sizeof(session.Session{}); got > 256 {
		t.Errorf("a Session is %d bytes", got)
	}
	cfg := session.DefaultConfig()
	p := connect(&cfg)
	pub := wire.AppendPub(nil, "t", []byte("b"))
	burst := func(n int) {
		for range n {
			_, op := p.s.Step(pub, p.now)
			p.s.Done(op, nil)
		}
		p.s.ClearOutput()
	}
	burst(300)
	if got := cap(p.s.Output()); got < 3000 {
		t.Errorf("a busy session keeps %d bytes of output between bursts", got)
	}
	p.at(30 * mono.Time(time.Second))
	p.s.ClearOutput()
	if got := cap(p.s.Output()); got > 64 {
		t.Errorf("an idle session keeps %d bytes of output", got)
	}
	burst(1000)
	if got := cap(p.s.Output()); got > 4096 {
		t.Errorf("after a large burst a session keeps %d bytes of output", got)
	}
}

func TestSteadyStateAllocatesNothing(t *testing.T) {
	cfg := session.DefaultConfig()
	p := connect(&cfg).send(command("SUB"))
	full := wire.NewError(wire.CodeQueueFull, "topic t is full")
	for _, tc := range []struct {
		verb string
		err  error
	}{
		{"PUB", nil}, {"PUB", full}, {"MPUB", nil}, {"DPUB", nil}, {"RDY", nil}, {"FIN", nil}, {"REQ", nil}, {"TOUCH", nil}, {"NOP", nil},
	} {
		in := command(tc.verb)
		f := func() {
			n, op := p.s.Step(in, 1)
			if n != len(in) { // allocations for Equal's arguments would count
				t.Errorf("%s: consumed %d", tc.verb, n)
			}
			if op.Kind != session.OpNone {
				p.s.Done(op, tc.err)
			}
			p.s.ClearOutput()
		}
		f() // grows the output once
		testkit.Equal(t, testing.AllocsPerRun(200, f), 0, "allocations of %s with %v", tc.verb, tc.err)
	}
}

func BenchmarkStepDone(b *testing.B) {
	cfg := session.DefaultConfig()
	for _, verb := range []string{"PUB", "FIN", "NOP"} {
		b.Run(verb, func(b *testing.B) {
			p := connect(&cfg).send(command("SUB"))
			in := command(verb)
			b.ReportAllocs()
			for b.Loop() {
				n, op := p.s.Step(in, 1)
				if op.Kind != session.OpNone {
					p.s.Done(op, nil)
				}
				if n == 0 {
					b.Fatal("not consumed")
				}
				p.s.ClearOutput()
			}
		})
	}
}
