package wire

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

// fuzzCap keeps the quadratic oracles over all prefixes fast.
const fuzzCap = 1 << 11

func seedCommands(f *testing.F) {
	var id MessageID
	copy(id[:], testID)
	for _, in := range [][]byte{
		AppendIdentify(nil, []byte(`{"client_id":"a"}`)),
		AppendAuth(nil, []byte("secret")),
		AppendPub(nil, "topic", []byte("body")),
		AppendPub(nil, "topic#ephemeral", []byte("\n")),
		AppendPub(nil, "topic", nil),
		AppendPub(nil, strings.Repeat("n", 65), []byte("body")),
		AppendDpub(nil, "topic", time.Second, []byte("body")),
		AppendDpub(nil, "topic", 2*time.Hour, []byte("body")),
		AppendMpub(nil, "topic", [][]byte{[]byte("a"), []byte("bc")}),
		AppendMpub(nil, "topic", [][]byte{[]byte("a"), nil}),
		AppendMpub(nil, "topic", nil),
		AppendSub(nil, "topic", "channel"),
		AppendRdy(nil, 100), AppendRdy(nil, -1),
		AppendFin(nil, id), AppendTouch(nil, id),
		AppendReq(nil, id, time.Minute), AppendReq(nil, id, -time.Minute),
		AppendNop(nil), AppendCls(nil),
		[]byte("PUB t\r\n\x00\x00\x00\x01b"),
		[]byte("PUB t ignored\n\x00\x00\x00\x01b"),
		[]byte("FIN 0123456789abcde\r\n"),
		[]byte("FIN 01234567 9abcdef\n"),
		[]byte("FIN 0123456\n89abcdef\n"),
		[]byte("FIN 0123456789abcde\xff\n"),
		[]byte("PUB t\n\xff\xff\xff\xff"),
		[]byte("MPUB t\n\x00\x00\x00\x09\x00\x00\x00\x02\x00\x00\x00\x01a"),
		[]byte("MPUB t\n\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00\x01a\x00\x00\x00\x02bcNOP\n"),
		[]byte("MPUB t\n\x00\x00\x00\xff\x00\x00\x00\x01\x00\x00\x00\x01a\x00\x00\x00\x02bcNOP\n"),
		[]byte("MPUB t\n\x00\x00\x00\x0a\x00\x00\x00\x01\x00\x00\x00\x01ab"),
		bytes.Repeat([]byte("x"), MaxLine+1),
		append(bytes.Repeat([]byte("x"), MaxLine), '\n'),
		append(bytes.Repeat([]byte("x"), MaxLine-1), '\n'),
	} {
		f.Add(in)
	}
}

// FuzzParseCommand checks the guarantees of ParseCommand: the verdict is the slow reference's; an error or "more" comes
// with no other result; every prefix shorter than the requested bytes only requests more, and no prefix has another verdict
// than the whole; and a parsed command, encoded again, parses to the same command.
func FuzzParseCommand(f *testing.F) {
	seedCommands(f)
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) > fuzzCap {
			return
		}
		lim := testLimits()
		want, wantN, wantCode := reference(in, lim)
		cmd, n, need, err := ParseCommand(in, lim)
		var e *Error
		switch {
		case errors.As(err, &e):
			if n != 0 || need != 0 || commandDiff(cmd, Command{}) != "" {
				t.Fatalf("error %v with n=%d need=%d cmd=%+v", err, n, need, cmd)
			}
			if e.Code != wantCode || !e.Fatal {
				t.Fatalf("%v, fatal=%v; the reference says %q", err, e.Fatal, wantCode)
			}
		case err != nil:
			t.Fatalf("an error without a code: %v", err)
		case n == 0:
			if need <= len(in) || need > lim.MaxCommandSize() || commandDiff(cmd, Command{}) != "" {
				t.Fatalf("of %d bytes: need=%d cmd=%+v", len(in), need, cmd)
			}
			if wantN != 0 || wantCode != "" {
				t.Fatalf("wants %d bytes; the reference has n=%d code %q", need, wantN, wantCode)
			}
		default:
			if n > len(in) || need != 0 || n != wantN || wantCode != "" {
				t.Fatalf("n=%d need=%d; the reference has n=%d code %q", n, need, wantN, wantCode)
			}
			if got := fieldsOf(cmd); !reflect.DeepEqual(got, want) {
				t.Fatalf("got %+v, the reference has %+v", got, want)
			}
			again, n2, _, err := ParseCommand(encode(cmd), lim)
			if diff := commandDiff(again, cmd); err != nil || n2 == 0 || diff != "" {
				t.Fatalf("encoded again: n=%d err=%v %s", n2, err, diff)
			}
		}
		checkPrefixes(t, in, lim)
	})
}

func checkPrefixes(t *testing.T, in []byte, lim Limits) {
	t.Helper()
	whole, wholeN, _, wholeErr := ParseCommand(in, lim)
	asked := 0
	var seen Walk // of all prefixes so far
	for k := 0; k <= len(in); k++ {
		cmd, n, need, err := ParseCommand(in[:k:k], lim)
		var kept Command
		keptN, keptNeed, keptErr := kept.Parse(in[:k:k], &lim, &seen)
		if diff := commandDiff(kept, cmd); keptN != n || keptNeed != need || fmt.Sprint(keptErr) != fmt.Sprint(err) || diff != "" {
			t.Fatalf("at %d bytes, gone on: n=%d need=%d err=%v, from the start: n=%d need=%d err=%v; %s", k, keptN, keptNeed, keptErr, n, need, err, diff)
		}
		if err == nil && n == 0 {
			if need <= k || need < asked {
				t.Fatalf("at %d bytes: need=%d after need=%d", k, need, asked)
			}
			if k < asked && need != asked {
				t.Fatalf("at %d bytes: need=%d, though %d were asked for before", k, need, asked)
			}
			asked = need
			continue
		}
		if k < asked {
			t.Fatalf("at %d bytes: n=%d err=%v, though %d were asked for", k, n, err, asked)
		}
		if n != wholeN || (err == nil) != (wholeErr == nil) || err != nil && err.Error() != wholeErr.Error() {
			t.Fatalf("at %d bytes: n=%d err=%v, whole: n=%d err=%v", k, n, err, wholeN, wholeErr)
		}
		testkit.MustEqual(t, commandDiff(cmd, whole), "", "at %d bytes", k)
		return
	}
	if wholeN != 0 || wholeErr != nil {
		t.Fatalf("no prefix has the whole's n=%d err=%v", wholeN, wholeErr)
	}
}

// encode is the client's side of any parsed command.
func encode(c Command) []byte {
	switch c.Verb {
	case VerbIdentify:
		return AppendIdentify(nil, c.Body)
	case VerbAuth:
		return AppendAuth(nil, c.Body)
	case VerbPub:
		return AppendPub(nil, string(c.Topic), c.Body)
	case VerbMpub:
		var bodies [][]byte
		c.Batch.Each(func(b []byte) { bodies = append(bodies, b) })
		return AppendMpub(nil, string(c.Topic), bodies)
	case VerbDpub:
		return AppendDpub(nil, string(c.Topic), c.Delay, c.Body)
	case VerbSub:
		return AppendSub(nil, string(c.Topic), string(c.Channel))
	case VerbRdy:
		return AppendRdy(nil, c.Ready)
	case VerbFin:
		return AppendFin(nil, c.ID)
	case VerbReq:
		return AppendReq(nil, c.ID, c.Delay)
	case VerbTouch:
		return AppendTouch(nil, c.ID)
	case VerbNop:
		return AppendNop(nil)
	case VerbCls:
		return AppendCls(nil)
	}
	return nil
}

// FuzzParseFrame checks that an error or "more" comes with no other result, that no prefix has another verdict than the
// whole, and that a parsed frame encodes to its original bytes.
func FuzzParseFrame(f *testing.F) {
	var id MessageID
	copy(id[:], testID)
	f.Add(AppendResponse(nil, OK))
	f.Add(AppendResponse(nil, ""))
	f.Add(AppendError(nil, NewError(CodeBadTopic, "text")))
	f.Add(AppendError(nil, RateLimited(time.Second)))
	f.Add(AppendMessage(nil, 1, 2, id, []byte("body")))
	f.Add(AppendMessage(nil, -1, 65535, id, nil))
	f.Add([]byte{0, 0, 0, 3, 0, 0, 0, 0})
	f.Add([]byte{0, 0, 0, 4, 0, 0, 0, 3})
	f.Add([]byte{255, 255, 255, 255})
	f.Add([]byte{0, 0, 0, 20, 0, 0, 0, 2, 1, 2, 3})
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) > fuzzCap {
			return
		}
		const limit = 256
		kind, data, n, err := ParseFrame(in, limit)
		if n == 0 && (kind != 0 || data != nil) || err != nil && (n != 0 || !errors.Is(err, ErrFrame)) || n > len(in) {
			t.Fatalf("kind=%v data=%q n=%d of %d err=%v", kind, data, n, len(in), err)
		}
		decided := false
		for k := 0; k <= len(in); k++ {
			pkind, pdata, pn, perr := ParseFrame(in[:k:k], limit)
			if pn == 0 && perr == nil {
				if decided {
					t.Fatalf("undecided again at %d bytes", k)
				}
				if size, err := FrameSize(in[:k], limit); err != nil || size != 0 && size <= k {
					t.Fatalf("at %d bytes: frame of %d bytes (%v) is not parsed", k, size, err)
				}
				continue
			}
			decided = true
			if pkind != kind || !bytes.Equal(pdata, data) || pn != n || (perr == nil) != (err == nil) {
				t.Fatalf("at %d bytes: %v %q %d %v, whole: %v %q %d %v", k, pkind, pdata, pn, perr, kind, data, n, err)
			}
		}
		if n == 0 {
			return
		}
		if len(data) > limit || n != FrameOverhead+len(data) {
			t.Fatalf("data of %d bytes, limit %d, n=%d", len(data), limit, n)
		}
		var out []byte
		switch kind {
		case FrameResponse:
			out = AppendResponse(nil, data)
		case FrameError:
			e := ParseError(data)
			if out = AppendError(nil, e); e.Text == "" && bytes.HasSuffix(data, []byte(" ")) {
				return // "E_CODE " is read as a code without a text
			}
		case FrameMessage:
			m, err := ParseMessage(data)
			if err != nil {
				if !errors.Is(err, ErrMessage) || len(data) >= messageHeader {
					t.Fatalf("message of %d bytes: %v", len(data), err)
				}
				return
			}
			out = AppendMessage(nil, m.Timestamp, m.Attempts, m.ID, m.Body)
		}
		if !bytes.Equal(out, in[:n]) {
			t.Fatalf("encoded again:\n% x\nparsed from:\n% x", out, in[:n])
		}
	})
}

// FuzzNames compares the name rule with the client libraries' regular expression.
func FuzzNames(f *testing.F) {
	for _, s := range []string{"", "a", "#ephemeral", "a#ephemeral", "a#ephemeral#ephemeral", "ä", "a b", "a\n", strings.Repeat("a", 64), strings.Repeat("a", 65), strings.Repeat("a", 55) + "#ephemeral", "#", "a#", "\x00", "\xff"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		want := referenceName(s)
		if ValidTopicName(s) != want || ValidChannelName(s) != want || ValidTopicName([]byte(s)) != want {
			t.Fatalf("%q: topic %v, channel %v, bytes %v, want %v", s, ValidTopicName(s), ValidChannelName(s), ValidTopicName([]byte(s)), want)
		}
		testkit.MustEqual(t, Ephemeral(s), strings.HasSuffix(s, "#ephemeral"), "Ephemeral(%q)", s)
	})
}
