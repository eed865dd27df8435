package session_test

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/mqtt/names"
	"github.com/srtm-io/srtm/mqtt/session"
	nsq "github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
)

// connected returns a peer whose client is connected.
func connected(t interface{ Fatal(...any) }, cfg *session.Config, version byte, words ...string) *peer {
	p := newPeer(t, cfg, testRules, false)
	p.send(stream(version, "connect id=c clean "+strings.Join(words, " ")))
	p.did()
	p.packets()
	return p
}

// The client gets its PUBACKs in the order of its publishes, although one of them is refused without a look at the broker.
func TestAnswersKeepTheOrderOfPublishes(t *testing.T) {
	cfg := smallConfig()
	p := connected(t, &cfg, 5)
	p.late = true
	p.outcome = func(op *nsq.Op) error {
		if op.Packet == 2 {
			return wire.NewError(wire.CodeBadTopic, "")
		}
		return nil
	}
	p.send(stream(5, "publish topic=alone qos=1 id=1", "publish topic=two/levels qos=1 id=2", "publish topic=alone qos=1 id=3"))
	testkit.Equal(t, len(p.packets()), 0)
	p.settle()
	testkit.Equal(t, strings.Join(p.packets(), ", "), "PUBACK 40 02 00 01, PUBACK 40 04 00 02 90 00, PUBACK 40 02 00 03")
}

func TestClientExceedsReceiveMaximum(t *testing.T) {
	cfg := smallConfig()
	for _, version := range []byte{4, 5} {
		p := connected(t, &cfg, version)
		p.late = true
		for id := range cfg.MaxInflight {
			p.send(stream(version, fmt.Sprintf("publish topic=alone qos=1 id=%d", id+1)))
		}
		p.send(stream(version, "publish topic=alone", "publish topic=alone qos=1 id=9", "publish topic=alone qos=1 id=10"))
		testkit.Equal(t, p.ended(), "", "the answers come first")
		p.settle()
		switch packets := p.packets(); version {
		case 4:
			testkit.Equal(t, len(packets), cfg.MaxInflight+2)
		case 5:
			testkit.Equal(t, len(packets), cfg.MaxInflight+1)
			testkit.Equal(t, strings.HasPrefix(packets[cfg.MaxInflight], "DISCONNECT e0 3b 93"), true, packets[cfg.MaxInflight])
			testkit.Equal(t, len(p.did()), cfg.MaxInflight+1)
		}
	}
}

// Attributes, publishers and envelopes of unanswered publishes stay valid while later publishes are read.
func TestOperationsStayValidUntilTheirAnswer(t *testing.T) {
	cfg := session.DefaultConfig()
	s := session.New(&cfg, rulesOf(t, testRules), false, 0)
	var op nsq.Op
	in := stream(5, "connect id=c clean")
	s.StepInto(in, 0, &op)
	s.Answer(&op, nil)
	type kept struct{ attribute, publisher, body []byte }
	var all []kept
	for i := range 100 {
		in := stream(5, fmt.Sprintf("publish topic=tenants/t%d/x payload=p%d alias=1", i, i))
		if i%2 == 1 {
			in = stream(5, fmt.Sprintf("publish topic=events/e%d payload=%d alias=1", i, i))
		}
		s.StepInto(in, 0, &op)
		all = append(all, kept{op.MQTT.Attribute, op.MQTT.Publisher, op.Body})
	}
	for i, k := range all {
		want := fmt.Sprintf("tenants/t%d/x", i)
		if i%2 == 1 {
			want = fmt.Sprintf("events/e%d", i)
			testkit.Equal(t, string(names.AppendPayload(nil, k.body)), fmt.Sprint(i))
		} else {
			testkit.Equal(t, string(k.publisher), fmt.Sprint("t", i))
		}
		a, _ := names.ParseAttribute(k.attribute)
		testkit.Equal(t, string(a.Name), want)
		s.Answer(&nsq.Op{Kind: nsq.OpPub}, nil)
	}
}

// A server that was stopped must read what has come meanwhile before it closes.
func TestLateTickGivesTheClientTime(t *testing.T) {
	cfg := smallConfig()
	for _, late := range []time.Duration{0, time.Second, 11 * time.Second, time.Hour} {
		p := connected(t, &cfg, 4, "keepalive=20")
		testkit.Equal(t, p.s.Deadline(), mono.Time(20*time.Second))
		now := mono.Time(20*time.Second + late)
		p.s.Tick(now)
		testkit.Equal(t, p.ended(), "")
		testkit.Equal(t, p.s.Deadline(), now.Add(10*time.Second))
		now = p.s.Deadline().Add(late)
		p.s.Tick(now)
		if late > 10*time.Second {
			testkit.Equal(t, p.ended(), "", "stopped again")
			p.s.Tick(p.s.Deadline())
		}
		testkit.Equal(t, p.ended(), "MQTT reason 0x8D: no packet for 1.5 times the keep alive")
		testkit.Equal(t, p.s.Deadline(), mono.Never)
	}
}

// A driver sets its timer after Tick and CONNECT only, so nothing else may make the deadline earlier.
func TestOnlyTickMakesTheDeadlineEarlier(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := smallConfig()
		p := connected(t, &cfg, 4, "keepalive=9")
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			before := p.s.Deadline()
			p.now = min(before, p.now.Add(time.Duration(rapid.Int64Range(0, int64(6*time.Second)).Draw(t, "pause"))))
			switch rapid.IntRange(0, 2).Draw(t, "step") {
			case 0:
				p.send(stream(4, "ping"))
			case 1:
				p.s.Heard(p.now)
			case 2:
				p.s.Tick(p.now)
				before = 0
			}
			if p.ended() != "" {
				return
			}
			if after := p.s.Deadline(); after < before || after < p.now {
				t.Fatalf("at %d: the deadline %d became %d", p.now, before, after)
			}
		}
	})
}

// The model is the table of packet identifiers as the specification describes it.
func TestDeliveriesAgreeWithTheModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := session.DefaultConfig()
		window := rapid.IntRange(1, 9).Draw(t, "window")
		p := connected(t, &cfg, 5, fmt.Sprint("receive=", window))
		p.send(stream(5, "subscribe id=1 alone:1"))
		p.packets()
		p.did()
		source := session.Source{Topic: "alone", Channel: "mqtt.c#ephemeral", Number: 5}
		flying, last := map[uint16]byte{}, byte(0) // message by packet identifier
		for range rapid.IntRange(1, 100).Draw(t, "steps") {
			testkit.MustEqual(t, p.s.Window(), window-len(flying))
			switch rapid.IntRange(0, 3).Draw(t, "step") {
			case 0, 1:
				last++
				out, outcome := p.s.AppendMessage(nil, &source, &wire.Message{ID: wire.MessageID{last}, Attempts: 1}, nil)
				if len(flying) == window {
					testkit.MustEqual(t, outcome, session.Blocked)
					continue
				}
				testkit.MustEqual(t, outcome, session.Sent)
				id := uint16(out[9])<<8 | uint16(out[10])
				if _, used := flying[id]; used || id == 0 {
					t.Fatalf("packet identifier %d twice", id)
				}
				flying[id] = last
			case 2:
				id := rapid.Uint16Range(0, 20).Draw(t, "id")
				if message, ok := flying[id]; ok {
					out, outcome := p.s.AppendMessage(nil, &source, &wire.Message{ID: wire.MessageID{message}, Attempts: 2}, nil)
					testkit.MustEqual(t, outcome, session.Sent)
					testkit.MustEqual(t, uint16(out[9])<<8|uint16(out[10]), id)
					testkit.MustEqual(t, out[0], 0x3a)
				}
			case 3:
				id := rapid.Uint16Range(0, 20).Draw(t, "id")
				p.send(stream(5, fmt.Sprint("puback id=", id)))
				message, ok := flying[id]
				delete(flying, id)
				want := ""
				if ok {
					want = fmt.Sprintf("FIN id=%s source=5", wire.MessageID{message})
				}
				testkit.MustEqual(t, strings.Join(p.did(), ", "), want)
			}
		}
	})
}

func TestNewRulesKeepTheLimitOfSources(t *testing.T) {
	rules := func(topics int) *names.Rules {
		text := ""
		for i := range topics {
			for _, site := range []string{"x", "y"} {
				text += fmt.Sprintf("[[mqtt]]\nfilter = \"%s/%d\"\ntopic = \"%[1]s%[2]d\"\n", site, i)
			}
		}
		return rulesOf(t, text)
	}
	cfg := smallConfig() // five sources
	p := connected(t, &cfg, 5)
	for topics, want := range map[int]string{2: "[x0 x1] [y0 y1]", 3: "[x0 x1 x2] []"} {
		p.s.UseRules(rules(2))
		p.send(stream(5, "subscribe id=1 x/#:1 y/#:1"))
		p.s.UseRules(rules(topics))
		filters := p.s.Subscriptions()
		testkit.Equal(t, fmt.Sprint(filters[0].Topics, filters[1].Topics), want)
	}
}

func TestConfigValidation(t *testing.T) {
	cfg := session.DefaultConfig()
	testkit.Must(t, cfg.Validate())
	bad := session.Config{MaxPacketSize: 1, MaxInflight: 1 << 15, MaxSessionExpiry: -1, MaxAliases: -1}
	err := bad.Validate()
	for _, want := range []string{"--mqtt-max-packet-size 1 bytes", "--mqtt-max-inflight 32768", "--mqtt-max-session-expiry -1ns", "connect timeout", "filters", "sources", "aliases"} {
		testkit.ErrorHas(t, err, want)
	}
}

// The whole budget of an idle connection is 3 KiB.
func TestSessionIsSmall(t *testing.T) {
	if got := unsafe.Sizeof(session.Session{}); got > 480 {
		t.Errorf("a Session is %d bytes", got)
	}
	// An operation of NSQ pays for the two fields of MQTT when the driver clears the operation.
	if got := unsafe.Sizeof(nsq.Op{}); got > 208 {
		t.Errorf("an Op is %d bytes", got)
	}
}

// heapOf returns the bytes of the heap that one of many sessions keeps after it has carried out the commands.
func heapOf(t *testing.T, commands ...string) int {
	cfg := session.DefaultConfig()
	rules, in := rulesOf(t, testRules), stream(5, commands...)
	sessions := make([]*session.Session, 1000)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for i := range sessions {
		s := session.New(&cfg, rules, false, 0)
		var op nsq.Op
		for rest := in; ; {
			n := s.StepInto(rest, 0, &op)
			if op.Kind != nsq.OpNone {
				s.Answer(&op, nil)
			}
			if rest = rest[n:]; n == 0 {
				break
			}
		}
		if closing, cause := s.Closing(); closing {
			t.Fatal(cause)
		}
		s.ClearOutput()
		sessions[i] = s
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	runtime.KeepAlive(sessions)
	return int(after.HeapAlloc-before.HeapAlloc) / len(sessions)
}

func TestIdleSessionIsSmall(t *testing.T) {
	device := []string{"connect id=truck-0000017 clean keepalive=60 user=u password=secret", "publish topic=fleet/truck-17/telemetry payload=21 qos=1 id=1"}
	many := device
	for range 400 {
		many = append(many, device[1])
	}
	for name, c := range map[string]struct {
		commands []string
		most     int
	}{
		"device":                    {device, 900},
		"device after a burst":      {many, 900 + 4<<10},
		"the same after a PINGREQ":  {append(many, "ping"), 900},
		"subscriber of two filters": {[]string{device[0], "subscribe id=1 fleet/+/telemetry:1 alone:1"}, 1500},
	} {
		got := heapOf(t, c.commands...)
		t.Logf("%s: %d bytes", name, got)
		if got > c.most {
			t.Errorf("%s: a session takes %d bytes, at most %d are allowed", name, got, c.most)
		}
	}
}

// publisher returns a session that carries out a PUBLISH and its answer.
func publisher(t testing.TB, version byte, command string) (do func(), in []byte) {
	cfg := session.DefaultConfig()
	rules := rulesOf(t, testRules)
	s := session.New(&cfg, rules, false, 0)
	var op nsq.Op
	s.StepInto(stream(version, "connect id=c clean"), 0, &op)
	s.Answer(&op, nil)
	in = stream(version, command)
	return func() {
		if s.StepInto(in, 0, &op) != len(in) || op.Kind != nsq.OpPub {
			t.Fatal("no publish")
		}
		s.Answer(&op, nil)
		s.ClearOutput()
	}, in
}

// subscriber returns a session that is sent a message, and acknowledges the message.
func subscriber(t testing.TB, version byte, envelope bool) func() {
	cfg := session.DefaultConfig()
	s := session.New(&cfg, rulesOf(t, testRules), false, 0)
	var op nsq.Op
	for _, command := range []string{"connect id=c clean", "subscribe id=1 fleet/+/telemetry:1"} {
		s.StepInto(stream(version, command), 0, &op)
		s.Answer(&op, nil)
	}
	s.ClearOutput()
	source := session.Source{Topic: "telemetry", Channel: op.MQTT.Filters[0].Channel}
	a := names.Attribute{Name: []byte("fleet/truck-17/telemetry"), Envelope: envelope}
	m := wire.Message{ID: wire.MessageID{1}, Attempts: 1, Body: make([]byte, 100)}
	if envelope {
		m.Body = names.AppendEnvelope(nil, &names.Event{Client: "c", Name: a.Name, Payload: m.Body})
	}
	attribute, ack := a.Append(nil), []byte{0x40, 2, 0, 0}
	var out []byte
	at := 2 + 2 + len(a.Name)
	return func() {
		var outcome session.Outcome
		out, outcome = s.AppendMessage(out[:0], &source, &m, attribute)
		if outcome != session.Sent {
			t.Fatal(outcome)
		}
		if out[1] >= 0x80 {
			at = 3 + 2 + len(a.Name)
		}
		ack[2], ack[3] = out[at], out[at+1]
		s.StepInto(ack, 0, &op)
		if op.Kind != nsq.OpFin || op.ID != m.ID {
			t.Fatal("no FIN")
		}
		s.Answer(&op, nil)
	}
}

const benchmarkPublish = "publish topic=fleet/truck-17/telemetry qos=1 id=7 payload=0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789"

func TestMessagesDoNotAllocate(t *testing.T) {
	for _, version := range []byte{4, 5} {
		for _, command := range []string{
			benchmarkPublish,
			"publish topic=alone payload=x",
			"publish topic=alone payload=x qos=1 id=1 users=2 message-expiry=3 response=a correlation=b",
			"publish topic=tenants/acme/x/y payload=x qos=1 id=1",
			"publish topic=events/door payload={} qos=1 id=1",
			"publish topic=events/door payload=binary qos=1 id=1",
			"publish topic=two/levels payload=x qos=1 id=1",
		} {
			do, _ := publisher(t, version, command)
			if got := testing.AllocsPerRun(200, do); got > 0 {
				t.Errorf("version %d, %s: %v allocations", version, command, got)
			}
		}
		for _, envelope := range []bool{false, true} {
			if got := testing.AllocsPerRun(200, subscriber(t, version, envelope)); got > 0 {
				t.Errorf("version %d, delivery (envelope %v): %v allocations", version, envelope, got)
			}
		}
	}
	refused := error(wire.NewError(wire.CodeQueueFull, "topic \"alone\" is full"))
	if got := testing.AllocsPerRun(200, func() {
		if session.ReasonOf(refused) != session.QuotaExceeded {
			t.Fatal("another reason")
		}
	}); got > 0 {
		t.Errorf("the reason of a full topic: %v allocations", got)
	}
	do, _ := publisher(t, 5, "publish topic=alone payload=x alias=1")
	if got := testing.AllocsPerRun(200, do); got > 0 {
		t.Errorf("alias: %v allocations", got)
	}
}

func BenchmarkPublish(b *testing.B) {
	for _, version := range []byte{4, 5} {
		b.Run(fmt.Sprint(version), func(b *testing.B) {
			do, _ := publisher(b, version, benchmarkPublish)
			b.ReportAllocs()
			for b.Loop() {
				do()
			}
		})
	}
}

func BenchmarkDeliver(b *testing.B) {
	for _, version := range []byte{4, 5} {
		b.Run(fmt.Sprint(version), func(b *testing.B) {
			do := subscriber(b, version, false)
			b.ReportAllocs()
			for b.Loop() {
				do()
			}
		})
	}
}

// A SUBSCRIBE is decoded on the event loop. The widest filters with the largest rules file must not take long.
func BenchmarkSubscribe(b *testing.B) {
	text := ""
	for i := range names.MaxRules {
		text += fmt.Sprintf("[[mqtt]]\nfilter = \"+/%d/+\"\ntopic = \"t%d\"\n", i, i)
	}
	cfg := session.DefaultConfig()
	s := session.New(&cfg, rulesOf(b, text), false, 0)
	var op nsq.Op
	s.StepInto(stream(5, "connect id=c clean"), 0, &op)
	s.Answer(&op, nil)
	command := "subscribe id=1"
	for i := range cfg.MaxFilters {
		command += fmt.Sprintf(" $share/w%d/+/+/+:1", i)
	}
	in := stream(5, command)
	for b.Loop() {
		if s.StepInto(in, 0, &op) != len(in) {
			b.Fatal("refused")
		}
		s.Answer(&op, nil)
		s.ClearOutput()
	}
}
