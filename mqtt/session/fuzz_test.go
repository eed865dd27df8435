package session_test

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/mqtt/session"
	nsq "github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
)

// fuzzCap limits the time of a run of one input, byte by byte.
const fuzzCap = 1 << 11

// fate decides the i-th operation by two bits of fates: the operation succeeds, is refused, fails, or fails with a
// reason of MQTT.
func fate(fates uint64) func(op *nsq.Op) error {
	i := 0
	return func(op *nsq.Op) error {
		bits := fates >> (i % 32 * 2) & 3
		i++
		switch {
		case op.Kind == nsq.OpTLS:
		case bits == 1:
			return wire.RateLimited(time.Duration(i) * time.Millisecond)
		case bits == 2 && op.Kind == nsq.OpFin:
			return errors.New("not in flight")
		case bits == 3 && i > 4:
			return &session.Error{Reason: session.NotAuthorized, Text: fmt.Sprint("operation ", i)}
		}
		return nil
	}
}

type transcript struct {
	Ops     []string
	Packets []string
	Ended   string
	Left    int
	Need    int
	Filters []nsq.Filter
}

func (p *peer) transcript() transcript {
	p.settle()
	return transcript{p.did(), p.packets(), p.ended(), len(p.buf), p.s.Need(), p.s.Subscriptions()}
}

func stream(version byte, commands ...string) (b []byte) {
	for _, c := range commands {
		encoded, ok := encode(version, strings.Fields(c))
		if !ok {
			panic(c)
		}
		b = append(b, encoded...)
	}
	return b
}

var conversation = []string{
	"connect id=c keepalive=60 expiry=10 will=alone payload=w user=u password=p receive=2",
	"subscribe id=1 fleet/+/telemetry:1 alone:0 bad/#:1",
	"publish topic=fleet/a/telemetry payload=21 qos=1 id=7",
	"publish topic=events/a payload={} qos=1 id=8",
	"publish topic=two/levels payload=x qos=1 id=9",
	"publish topic=alone payload=x",
	"puback id=1",
	"ping",
	"unsubscribe id=3 alone other",
	"disconnect",
}

// FuzzSession feeds indistinguishable with any bytes.
func FuzzSession(f *testing.F) {
	for _, version := range []byte{4, 5} {
		f.Add(stream(version, conversation...), uint64(0))
		f.Add(stream(version, conversation...), uint64(0b01_01_00_00))
		f.Add(stream(version, conversation...), uint64(0b11)<<10)
		f.Add(stream(version, append(conversation[:1:1], "subscribe id=1 $share/w/events/+:1 #:1", "connect id=d")...), uint64(0))
		f.Add(append(stream(version, conversation[0]), 0x30, 0xff, 0xff, 0xff, 0x7f), uint64(0))
		f.Add(append(stream(version, conversation[0]), 0x82, 6, 0, 1, 0, 0, 1, 'a'), uint64(0))
	}
	f.Add(stream(5, "connect clean", "publish topic=alone payload=x alias=1", "publish payload=y alias=1", "publish topic=alone alias=3 payload=z"), uint64(0))
	f.Add(stream(5, "connect clean", "disconnect reason=4 expiry=10"), uint64(0))
	f.Add([]byte("GET / HTTP/1.1\r\n"), uint64(0))
	f.Fuzz(func(t *testing.T, in []byte, fates uint64) {
		if len(in) <= fuzzCap {
			testkit.Must(t, indistinguishable(t, in, fates))
		}
	})
}

// indistinguishable runs one input four times: whole; byte by byte; byte by byte with a Step only when Need is met;
// and with late answers to publishes. The client must not see a difference, nor must the driver, except that late
// answers let the driver see packets after a publish that ends the session.
func indistinguishable(t interface{ Fatal(...any) }, in []byte, fates uint64) error {
	cfg := smallConfig()
	cfg.MaxInflight = 1 << 14 // the limit depends on the answers
	// run sends the bytes that are held when due says so.
	run := func(late bool, due func(p *peer, held int) bool) *peer {
		p := newPeer(t, &cfg, testRules, false)
		p.outcome, p.late = fate(fates), late
		var held []byte
		for _, b := range in {
			if held = append(held, b); due(p, len(held)) {
				p.send(held)
				held = nil
			}
		}
		p.buf = append(p.buf, held...)
		return p
	}
	atOnce := func(_ *peer, held int) bool { return held == len(in) }

	whole := run(false, atOnce)
	if need := whole.s.Need(); whole.ended() == "" && (need <= len(whole.buf) || need > cfg.MaxPacketSize) {
		return fmt.Errorf("needs %d bytes with %d there", need, len(whole.buf))
	}
	want := whole.transcript()

	split := run(false, func(*peer, int) bool { return true })
	if err := same("byte by byte", split.transcript(), want); err != nil {
		return err
	}
	patient := run(false, func(p *peer, held int) bool { return len(p.buf)+held >= p.s.Need() })
	if err := same("byte by byte, as needed", patient.transcript(), want); err != nil {
		return err
	}
	got := run(true, atOnce).transcript()
	if want.Ended != "" && len(got.Ops) >= len(want.Ops) && got.Left <= want.Left {
		got.Ops, got.Left = got.Ops[:len(want.Ops)], want.Left
	}
	// A PINGRESP may overtake a PUBACK.
	got.Packets, want.Packets = withoutPings(got.Packets), withoutPings(want.Packets)
	return same("with late answers", got, want)
}

func withoutPings(packets []string) []string {
	return slices.DeleteFunc(packets, func(p string) bool { return p == "PINGRESP d0 00" })
}

func same(how string, got, want transcript) error {
	if !reflect.DeepEqual(got, want) {
		return fmt.Errorf("%s:\n%+v\nwhole:\n%+v", how, got, want)
	}
	return nil
}

// The same check for conversations that get further than random bytes do.
func TestHowBytesArriveIsInvisible(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		version := rapid.SampledFrom([]byte{4, 5}).Draw(t, "version")
		commands := append([]string{conversation[0]}, rapid.SliceOfN(rapid.SampledFrom(conversation[1:]), 0, 20).Draw(t, "commands")...)
		in := stream(version, commands...)
		if rapid.IntRange(0, 3).Draw(t, "damaged") == 0 {
			in[rapid.IntRange(0, len(in)-1).Draw(t, "at")] = rapid.Byte().Draw(t, "byte")
		}
		testkit.Must(t, indistinguishable(t, in, rapid.Uint64().Draw(t, "fates")))
	})
}
