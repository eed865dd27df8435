package wire_test

import (
	"bytes"
	"encoding/hex"
	"net/netip"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/admission/wire"
	"github.com/srtm-io/srtm/internal/testkit"
)

var (
	keyA = wire.Key{ID: 7, Secret: []byte("0123456789abcdef")}
	keyB = wire.Key{ID: 8, Secret: []byte("fedcba9876543210")}
)

func sealer(t testing.TB, keys ...wire.Key) *wire.Sealer {
	t.Helper()
	return testkit.Result(wire.NewSealer(keys)).Must(t)
}

// The layout, byte by byte, so that other implementations can be written from it.
func TestLayout(t *testing.T) {
	s := sealer(t, keyA)
	q := s.AppendQuestion(nil, wire.Question{Kind: wire.Ask, Flags: wire.Retry, Session: 0x1122334455667788, Number: 0x99aabbccddeeff00, Cost: 3, Wait: 500, Key: []byte("k1")})
	const question = "ad030101" + "1122334455667788" + "99aabbccddeeff00" + "00000003" + "000001f4" + "0007" + "0002" + "6b31"
	if got := hex.EncodeToString(q[:len(q)-16]); got != question {
		t.Errorf("question\n%s, want\n%s", got, question)
	}
	// openssl dgst -sha256 -hmac 0123456789abcdef, the first 16 bytes
	testkit.Equal(t, hex.EncodeToString(q[len(q)-16:]), "86d1165da294859715c546cabb73fc41", "its MAC")
	a := s.AppendAnswer(nil, wire.Answer{Kind: wire.Reply, Flags: wire.Admit, Session: 1, Number: 2, Value: 9, Wait: 5}, keyA.ID)
	const answer = "ad030201" + "0000000000000001" + "0000000000000002" + "00000009" + "0000000000000005"
	if got := hex.EncodeToString(a[:len(a)-16]); got != answer || len(a) != wire.AnswerSize {
		t.Errorf("answer\n%s, want\n%s", got, answer)
	}
	m := s.AppendAnswer(nil, wire.Answer{Kind: wire.Moved, Session: 1, Number: 2, Value: 9, Epoch: 5}, keyA.ID)
	testkit.Equal(t, hex.EncodeToString(m[:len(m)-16]), "ad030400"+"0000000000000001"+"0000000000000002"+"00000009"+"0000000000000005", "moved")
}

func TestRoundTrip(t *testing.T) {
	both, old, none := sealer(t, keyB, keyA), sealer(t, keyA), sealer(t)
	rapid.Check(t, func(t *rapid.T) {
		q := wire.Question{
			Kind:    rapid.SampledFrom([]wire.Kind{wire.Hello, wire.Ask, wire.Cancel}).Draw(t, "kind"),
			Flags:   rapid.Uint8Range(0, 3).Draw(t, "flags"),
			Session: rapid.Uint64().Draw(t, "session"),
			Number:  rapid.Uint64().Draw(t, "number"),
			Cost:    rapid.Uint32().Draw(t, "cost"),
			Wait:    rapid.Uint32().Draw(t, "wait"),
		}
		if q.Kind != wire.Hello {
			q.Key = rapid.SliceOfN(rapid.Byte(), 1, wire.MaxKey).Draw(t, "key")
		}
		asker, server := old, both // while keys are being replaced
		if rapid.Bool().Draw(t, "no MAC") {
			asker, server = none, none
		}
		d := asker.AppendQuestion(nil, q)
		got, id, err := server.ParseQuestion(d)
		if err != nil || got.Kind != q.Kind || got.Flags != q.Flags || got.Session != q.Session || got.Number != q.Number || got.Cost != q.Cost || got.Wait != q.Wait || !bytes.Equal(got.Key, q.Key) {
			t.Fatalf("%+v came as %+v, %v", q, got, err)
		}
		a := wire.Answer{
			Kind: rapid.SampledFrom([]wire.Kind{wire.Reply, wire.Issued, wire.Moved, wire.Busy, wire.Waiting}).Draw(t, "answer"), Flags: rapid.Uint8Range(0, 15).Draw(t, "flags"),
			Session: q.Session, Number: q.Number, Value: rapid.Uint32().Draw(t, "value"),
		}
		if a.Kind == wire.Moved {
			a.Epoch = rapid.Uint32().Draw(t, "epoch")
		} else {
			a.Wait = rapid.Uint64().Draw(t, "wait of the answer")
		}
		back := server.AppendAnswer(nil, a, id)
		if len(back) > len(d) {
			t.Fatalf("an answer of %d bytes to a question of %d", len(back), len(d))
		}
		if got, err := asker.ParseAnswer(back); err != nil || got != a {
			t.Fatalf("%+v came as %+v, %v", a, got, err)
		}
		// With a MAC, the receiver notices any byte that was changed in flight.
		if asker != none {
			i := rapid.IntRange(0, len(d)-1).Draw(t, "byte")
			d[i] ^= 1 << rapid.IntRange(0, 7).Draw(t, "bit")
			if got, _, err := server.ParseQuestion(d); err == nil {
				t.Fatalf("byte %d was changed, and it came as %+v", i, got)
			}
			i = rapid.IntRange(0, len(back)-1).Draw(t, "byte of the answer")
			back[i] ^= 1 << rapid.IntRange(0, 7).Draw(t, "bit")
			if got, err := asker.ParseAnswer(back); err == nil {
				t.Fatalf("byte %d was changed, and it came as %+v", i, got)
			}
		}
	})
}

func TestWhoseMACItIs(t *testing.T) {
	q := wire.Question{Kind: wire.Ask, Key: []byte("k")}
	for _, test := range []struct {
		name          string
		asker, server *wire.Sealer
	}{
		{"a key that is not known", sealer(t, keyA), sealer(t, keyB)},
		{"another secret under the number", sealer(t, wire.Key{ID: keyB.ID, Secret: keyA.Secret}), sealer(t, keyB)},
		{"none where one is wanted", sealer(t), sealer(t, keyB)},
		{"one where none is", sealer(t, keyA), sealer(t)},
		{"number 0 where none is", sealer(t, wire.Key{Secret: keyA.Secret}), sealer(t)},
		{"none where number 0 is wanted", sealer(t), sealer(t, wire.Key{Secret: keyA.Secret})},
	} {
		_, _, err := test.server.ParseQuestion(test.asker.AppendQuestion(nil, q))
		testkit.ErrorIs(t, err, wire.ErrMAC, "%s", test.name)
	}
	if _, err := wire.NewSealer([]wire.Key{{ID: 1, Secret: make([]byte, 15)}}); err == nil {
		t.Error("a secret of 15 bytes was taken")
	}
	if _, err := wire.NewSealer([]wire.Key{keyA, keyA}); err == nil {
		t.Error("two keys of one number were taken")
	}
}

func TestSessions(t *testing.T) {
	at := netip.MustParseAddrPort
	s, restarted := wire.NewSessions([]byte("secret of this start")), wire.NewSessions([]byte("secret of another"))
	now := 480_000 * time.Hour
	asker := at("192.0.2.1:4000")
	id := s.Issue(asker, now)
	for _, test := range []struct {
		name string
		s    *wire.Sessions
		from string
		now  time.Duration
		want bool
	}{
		{"at once", s, "192.0.2.1:4000", now, true},
		{"an hour later", s, "192.0.2.1:4000", now + 2*time.Hour - 1, true},
		{"two hours later", s, "192.0.2.1:4000", now + 2*time.Hour, false},
		{"clock set back", s, "192.0.2.1:4000", now - 1, false},
		{"other port", s, "192.0.2.1:4001", now, false},
		{"other address", s, "192.0.2.2:4000", now, false},
		{"mapped address", s, "[::ffff:192.0.2.1]:4000", now, true},
		{"after a restart", restarted, "192.0.2.1:4000", now, false},
	} {
		testkit.Equal(t, test.s.Valid(id, at(test.from), test.now), test.want, "%s", test.name)
	}
}

func TestNothingIsAllocated(t *testing.T) {
	s, sessions := sealer(t, keyB, keyA), wire.NewSessions([]byte("secret"))
	from := netip.MustParseAddrPort("[2001:db8::1]:9")
	buf := make([]byte, 0, wire.MaxQuestion)
	q := wire.Question{Kind: wire.Ask, Key: []byte("tenant/acme/http")}
	testkit.Equal(t, testing.AllocsPerRun(100, func() {
		got, id, err := s.ParseQuestion(s.AppendQuestion(buf, q))
		if ok := sessions.Valid(sessions.Issue(from, 0), from, 0); err != nil || !ok {
			t.Fatal(err)
		}
		_, err = s.ParseAnswer(s.AppendAnswer(buf, wire.Answer{Kind: wire.Reply, Number: got.Number}, id))
		testkit.Must(t, err)
	}), 0, "allocations")
}

func FuzzParse(f *testing.F) {
	plain, sealed := sealer(f), sealer(f, keyA)
	for _, s := range []*wire.Sealer{plain, sealed} {
		q := s.AppendQuestion(nil, wire.Question{Kind: wire.Ask, Cost: 1, Key: []byte("key")})
		a := s.AppendAnswer(nil, wire.Answer{Kind: wire.Busy}, 0)
		for i := range q {
			f.Add(q[:i])
		}
		f.Add(q)
		f.Add(s.AppendQuestion(nil, wire.Question{Kind: wire.Cancel, Cost: 1, Key: []byte("key")}))
		f.Add(s.AppendAnswer(nil, wire.Answer{Kind: wire.Moved, Epoch: 3}, 0))
		f.Add(a)
	}
	f.Fuzz(func(t *testing.T, d []byte) {
		if _, _, err := sealed.ParseQuestion(d); err == nil && !bytes.HasSuffix(d, []byte("key")) {
			// Only sealed datagrams are accepted, and the fuzzer has no key.
			if q, _, _ := sealed.ParseQuestion(d); string(q.Key) != "key" {
				t.Fatalf("forged: %x", d)
			}
		}
		if q, _, err := plain.ParseQuestion(d); err == nil {
			if again := plain.AppendQuestion(nil, q); !bytes.Equal(again, d) {
				t.Fatalf("%x is written as %x", d, again)
			}
		}
		if a, err := plain.ParseAnswer(d); err == nil {
			if again := plain.AppendAnswer(nil, a, 0); !bytes.Equal(again, d) {
				t.Fatalf("%x is written as %x", d, again)
			}
		}
	})
}
