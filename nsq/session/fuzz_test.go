package session_test

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
)

// fuzzCap limits the time of a run of one input, byte by byte.
const fuzzCap = 1 << 11

func fuzzConfig(auth bool) session.Config {
	cfg := session.DefaultConfig()
	cfg.Limits.MaxMessageSize = 64
	cfg.Limits.MaxBodySize = 256
	cfg.AuthRequired = auth
	// The bytes after an IDENTIFY that upgrades are encrypted or compressed, or refused. There the pieces in which bytes
	// arrive do matter.
	cfg.Snappy, cfg.Deflate = false, false
	return cfg
}

// fate decides the i-th operation by two bits of fates: the operation succeeds, is refused, fails, or fails fatally with
// its own code.
func fate(fates uint64) func(op *session.Op) error {
	i := 0
	return func(op *session.Op) error {
		bits := fates >> (i % 32 * 2) & 3
		i++
		if op.Kind == session.OpAuth {
			op.Reply = []byte("{}")
		}
		switch bits {
		case 1:
			return wire.RateLimited(time.Duration(i) * time.Millisecond)
		case 2:
			if op.Kind == session.OpFin || op.Kind == session.OpReq || op.Kind == session.OpTouch {
				return errors.New("not in flight")
			}
		case 3:
			if i > 4 {
				return wire.NewError(wire.CodeUnauthorized, fmt.Sprint("operation ", i))
			}
		}
		return nil
	}
}

type transcript struct {
	Ops    []string
	Frames []string
	Ended  string
	Left   int
	Need   int
	Who    session.Identity
}

func (p *peer) transcript() transcript {
	p.settle()
	return transcript{p.did(), p.heard(), p.ended(), len(p.buf), p.s.Need(), p.s.Identity()}
}

// FuzzSession feeds indistinguishable with any bytes.
func FuzzSession(f *testing.F) {
	stream := func(verbs ...string) []byte {
		b := wire.AppendMagic(nil)
		for _, v := range verbs {
			b = append(b, command(v)...)
		}
		return b
	}
	f.Add(stream("IDENTIFY", "SUB", "RDY", "FIN", "REQ", "TOUCH", "CLS", "FIN", "RDY", "NOP"), uint64(0), false)
	f.Add(stream("IDENTIFY", "PUB", "MPUB", "DPUB", "PUB", "PUB", "NOP", "PUB"), uint64(0b01_00_01_00), false)
	f.Add(stream("PUB", "PUB", "PUB", "PUB", "PUB", "PUB", "PUB"), uint64(0b11)<<8, false)
	f.Add(stream("SUB", "FIN", "FIN", "REQ", "TOUCH"), uint64(0b10_10_10_10_00), false)
	f.Add(stream("PUB", "PUB", "IDENTIFY"), uint64(0), false)
	f.Add(stream("IDENTIFY", "AUTH", "PUB", "SUB"), uint64(0), true)
	f.Add(stream("IDENTIFY", "PUB"), uint64(0), true)
	f.Add(append(stream("PUB"), "PUB t\n\xff\xff\xff\xff"...), uint64(0), false)
	f.Add(append(stream("PUB", "NOP"), bytes.Repeat([]byte("x"), wire.MaxLine)...), uint64(0), false)
	f.Add([]byte("  V2MPUB t\n\x00\x00\x00\x02\x00\x00\x00\x02\x00\x00\x00\x01a\x00\x00\x00\x02bcNOP\n"), uint64(0), false)
	f.Add([]byte("GET / HTTP/1.1\r\n"), uint64(0), false)
	f.Add(append(wire.AppendMagic(nil), "IDENTIFY\n\x00\x00\x00\x1b{\"heartbeat_interval\":5000}"...), uint64(0), false)
	f.Add([]byte("  V2NOP\r\nPUB t\r\n\x00\x00\x00\x01bRDY 1\r\n"), uint64(0), false)
	f.Fuzz(func(t *testing.T, in []byte, fates uint64, auth bool) {
		if len(in) > fuzzCap {
			return
		}
		testkit.Must(t, indistinguishable(in, fates, auth))
	})
}

// indistinguishable runs one input four times: whole; byte by byte; byte by byte with a Step only when Need is met; and
// with late answers to publishes. The client must not see a difference, nor must the driver, except that late answers
// let the driver see commands after a fatal failure.
func indistinguishable(in []byte, fates uint64, auth bool) error {
	cfg := fuzzConfig(auth)
	peerOf := func(late bool) *peer {
		p := newPeer(&cfg)
		p.outcome, p.late = fate(fates), late
		return p
	}

	whole := peerOf(false)
	whole.send(bytes.Clone(in))
	if need := whole.s.Need(); whole.ended() == "" && (need <= len(whole.buf) || need > cfg.Limits.MaxCommandSize()) {
		return fmt.Errorf("needs %d bytes with %d there", need, len(whole.buf))
	}
	want := whole.transcript()
	if want.Ended != "" && !strings.HasPrefix(lastOf(want.Frames), "error "+want.Ended) {
		return fmt.Errorf("ended with %s, but the client last heard %q", want.Ended, lastOf(want.Frames))
	}

	split := peerOf(false)
	for _, b := range in {
		split.send([]byte{b})
	}
	if err := same("byte by byte", split.transcript(), want); err != nil {
		return err
	}

	patient := peerOf(false)
	var held []byte
	for _, b := range in {
		if held = append(held, b); len(patient.buf)+len(held) >= patient.s.Need() {
			patient.send(held)
			held = nil
		}
	}
	patient.buf = append(patient.buf, held...)
	if err := same("byte by byte, as needed", patient.transcript(), want); err != nil {
		return err
	}

	late := peerOf(true)
	late.send(bytes.Clone(in))
	got := late.transcript()
	if want.Ended != "" && len(got.Ops) >= len(want.Ops) && got.Left <= want.Left {
		got.Ops, got.Left = got.Ops[:len(want.Ops)], want.Left
	}
	return same("with late answers", got, want)
}

func same(how string, got, want transcript) error {
	if !reflect.DeepEqual(got, want) {
		return fmt.Errorf("%s:\n%+v\nwhole:\n%+v", how, got, want)
	}
	return nil
}

func lastOf(frames []string) string {
	if len(frames) == 0 {
		return ""
	}
	return frames[len(frames)-1]
}

// The same check for conversations that get further than random bytes do.
func TestHowBytesArriveIsInvisible(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := wire.AppendMagic(nil)
		for _, verb := range rapid.SliceOfN(rapid.SampledFrom(verbs), 0, 20).Draw(t, "verbs") {
			in = append(in, command(verb)...)
		}
		if rapid.Bool().Draw(t, "subscriber") {
			in = append(wire.AppendMagic(nil), command("SUB")...)
			for _, verb := range rapid.SliceOfN(rapid.SampledFrom([]string{"PUB", "MPUB", "RDY", "FIN", "REQ", "TOUCH", "NOP"}), 0, 20).Draw(t, "then") {
				in = append(in, command(verb)...)
			}
		}
		if rapid.IntRange(0, 3).Draw(t, "damaged") == 0 {
			in[rapid.IntRange(0, len(in)-1).Draw(t, "at")] = rapid.Byte().Draw(t, "byte")
		}
		testkit.Must(t, indistinguishable(in, rapid.Uint64().Draw(t, "fates"), rapid.IntRange(0, 9).Draw(t, "auth") == 0))
	})
}
