package wire

import (
	"encoding/binary"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

const testID = "0123456789abcdef"

func testLimits() Limits {
	return Limits{MaxMessageSize: 64, MaxBodySize: 128, MaxReqTimeout: time.Hour, MaxRdy: 100}
}

// sized returns body with its length before it.
func sized(body string) string {
	return string(binary.BigEndian.AppendUint32(nil, uint32(len(body)))) + body
}

// mpub returns an MPUB of n messages to topic t.
func mpub(body string, n int) Command {
	return Command{Verb: VerbMpub, Topic: []byte("t"), Batch: Batch{body: []byte(body), n: n}}
}

// u32 is a bare size or count prefix.
func u32(v uint32) string { return string(binary.BigEndian.AppendUint32(nil, v)) }

func TestParseCommandTakesEveryVerb(t *testing.T) {
	long := strings.Repeat("n", 64)
	var id MessageID
	copy(id[:], testID)
	for _, tc := range []struct {
		name string
		in   string
		want Command
	}{
		{"nop", "NOP\n", Command{Verb: VerbNop}},
		{"cls", "CLS\n", Command{Verb: VerbCls}},
		{"identify", "IDENTIFY\n" + sized("{}"), Command{Verb: VerbIdentify, Body: []byte("{}")}},
		{"identify, largest", "IDENTIFY\n" + sized(strings.Repeat("x", 128)), Command{Verb: VerbIdentify, Body: []byte(strings.Repeat("x", 128))}},
		{"auth", "AUTH\n" + sized("s3cret"), Command{Verb: VerbAuth, Body: []byte("s3cret")}},
		{"pub", "PUB t\n" + sized("b"), Command{Verb: VerbPub, Topic: []byte("t"), Body: []byte("b")}},
		{"pub, largest", "PUB t\n" + sized(strings.Repeat("x", 64)), Command{Verb: VerbPub, Topic: []byte("t"), Body: []byte(strings.Repeat("x", 64))}},
		{"pub, body of newlines", "PUB t\n" + sized("\n\r\n\n"), Command{Verb: VerbPub, Topic: []byte("t"), Body: []byte("\n\r\n\n")}},
		{"pub, longest name", "PUB " + long + "\n" + sized("b"), Command{Verb: VerbPub, Topic: []byte(long), Body: []byte("b")}},
		{"pub, ephemeral", "PUB t#ephemeral\n" + sized("b"), Command{Verb: VerbPub, Topic: []byte("t#ephemeral"), Body: []byte("b")}},
		{"dpub", "DPUB t 1500\n" + sized("b"), Command{Verb: VerbDpub, Topic: []byte("t"), Delay: 1500 * time.Millisecond, Body: []byte("b")}},
		{"dpub at once", "DPUB t 0\n" + sized("b"), Command{Verb: VerbDpub, Topic: []byte("t"), Body: []byte("b")}},
		{"dpub, longest", "DPUB t 3600000\n" + sized("b"), Command{Verb: VerbDpub, Topic: []byte("t"), Delay: time.Hour, Body: []byte("b")}},
		{"sub", "SUB t c\n", Command{Verb: VerbSub, Topic: []byte("t"), Channel: []byte("c")}},
		{"sub, longest names", "SUB " + long + " " + long + "\n", Command{Verb: VerbSub, Topic: []byte(long), Channel: []byte(long)}},
		{"rdy", "RDY 7\n", Command{Verb: VerbRdy, Ready: 7}},
		{"rdy, pause", "RDY 0\n", Command{Verb: VerbRdy}},
		{"rdy, most", "RDY 100\n", Command{Verb: VerbRdy, Ready: 100}},
		{"rdy, zeros before", "RDY 007\n", Command{Verb: VerbRdy, Ready: 7}},
		{"fin", "FIN " + testID + "\n", Command{Verb: VerbFin, ID: id}},
		{"touch", "TOUCH " + testID + "\n", Command{Verb: VerbTouch, ID: id}},
		{"req", "REQ " + testID + " 250\n", Command{Verb: VerbReq, ID: id, Delay: 250 * time.Millisecond}},
		{"req at once", "REQ " + testID + " 0\n", Command{Verb: VerbReq, ID: id}},
		{"req, longest", "REQ " + testID + " 3600000\n", Command{Verb: VerbReq, ID: id, Delay: time.Hour}},
		{"req past the longest is cut", "REQ " + testID + " 3600001\n", Command{Verb: VerbReq, ID: id, Delay: time.Hour}},
		{"req far past the longest is cut", "REQ " + testID + " 999999999999999999\n", Command{Verb: VerbReq, ID: id, Delay: time.Hour}},
		{"req below zero is cut", "REQ " + testID + " -1\n", Command{Verb: VerbReq, ID: id}},
		{"rdy without a count is 1", "RDY\n", Command{Verb: VerbRdy, Ready: 1}},
		{"rdy without a count, cr before lf", "RDY\r\n", Command{Verb: VerbRdy, Ready: 1}},
		{"identify with more", "IDENTIFY more\n" + sized("{}"), Command{Verb: VerbIdentify, Body: []byte("{}")}},
		{"auth with more", "AUTH a b\n" + sized("s"), Command{Verb: VerbAuth, Body: []byte("s")}},
		{"pub with more", "PUB t u\n" + sized("b"), Command{Verb: VerbPub, Topic: []byte("t"), Body: []byte("b")}},
		{"mpub with more", "MPUB t \n" + sized(u32(1)+sized("b")), mpub(sized("b"), 1)},
		{"mpub of a size without the count", "MPUB t\n" + u32(5) + u32(1) + sized("b"), mpub(sized("b"), 1)},
		{"mpub of a size without the sizes", "MPUB t\n" + u32(2) + u32(2) + sized("b") + sized("c"), mpub(sized("b")+sized("c"), 2)},
		{"mpub of a size past its messages", "MPUB t\n" + u32(128) + u32(1) + sized("b"), mpub(sized("b"), 1)},
		{"mpub of the largest body", "MPUB t\n" + u32(1) + u32(2) + sized(strings.Repeat("x", 64)) + sized(strings.Repeat("y", 52)), mpub(sized(strings.Repeat("x", 64))+sized(strings.Repeat("y", 52)), 2)},
		{"mpub of the most messages", "MPUB t\n" + u32(1) + u32(24) + strings.Repeat(sized("z"), 24), mpub(strings.Repeat(sized("z"), 24), 24)},
		{"dpub with more", "DPUB t 0 1\n" + sized("b"), Command{Verb: VerbDpub, Topic: []byte("t"), Body: []byte("b")}},
		{"sub as it was once", "SUB t c short long\n", Command{Verb: VerbSub, Topic: []byte("t"), Channel: []byte("c")}},
		{"rdy with more", "RDY 7 8\n", Command{Verb: VerbRdy, Ready: 7}},
		{"fin with more", "FIN " + testID + " 1\n", Command{Verb: VerbFin, ID: id}},
		{"touch with more", "TOUCH " + testID + " \n", Command{Verb: VerbTouch, ID: id}},
		{"req with more", "REQ " + testID + " 250 1\n", Command{Verb: VerbReq, ID: id, Delay: 250 * time.Millisecond}},
		{"nop with more", "NOP 1\n", Command{Verb: VerbNop}},
		{"cls with more", "CLS \n", Command{Verb: VerbCls}},
		{"cr before lf, no body", "NOP\r\n", Command{Verb: VerbNop}},
		{"cr before lf, argument", "RDY 7\r\n", Command{Verb: VerbRdy, Ready: 7}},
		{"cr before lf, body", "PUB t\r\n" + sized("b"), Command{Verb: VerbPub, Topic: []byte("t"), Body: []byte("b")}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, after := range []string{"", "NOP\n", "\x00garbage"} {
				got, n, need, err := ParseCommand([]byte(tc.in+after), testLimits())
				if err != nil || n != len(tc.in) || need != 0 {
					t.Fatalf("followed by %q: n=%d need=%d err=%v, want n=%d", after, n, need, err, len(tc.in))
				}
				testkit.MustEqual(t, commandDiff(got, tc.want), "", "followed by %q", after)
				if cap(got.Body) != len(got.Body) {
					t.Fatalf("the body of %d bytes can be appended into the next command", len(got.Body))
				}
			}
		})
	}
}

// Every refusal, and the number of input bytes after which the refusal must be known.
func TestParseCommandRefusals(t *testing.T) {
	const whole = -1 // the refusal may need all of the input
	long := strings.Repeat("n", 65)
	for _, tc := range []struct {
		name string
		in   string
		code ErrorCode
		at   int
	}{
		{"empty line", "\n", CodeInvalid, whole},
		{"cr alone", "\r\n", CodeInvalid, whole},
		{"space before the verb", " NOP\n", CodeInvalid, whole},
		{"unknown verb", "HELLO\n", CodeInvalid, whole},
		{"lower case", "nop\n", CodeInvalid, whole},
		{"verb as a prefix", "NOPE\n", CodeInvalid, whole},
		{"an http request", "GET / HTTP/1.1\r\n", CodeInvalid, whole},
		{"line without an end", strings.Repeat("x", MaxLine), CodeInvalid, whole},
		{"line one byte too long", "NOP" + strings.Repeat(" ", MaxLine-3) + "\n", CodeInvalid, MaxLine},
		{"nop with two cr", "NOP\r\r\n", CodeInvalid, whole},

		{"identify empty", "IDENTIFY\n" + u32(0), CodeBadBody, whole},
		{"identify too large", "IDENTIFY\n" + u32(129), CodeBadBody, whole},
		{"identify of a negative size", "IDENTIFY\n" + u32(math.MaxUint32), CodeBadBody, whole},
		{"auth empty", "AUTH\n" + u32(0), CodeBadBody, whole},
		{"auth too large", "AUTH\n" + u32(129), CodeBadBody, whole},

		{"pub without a topic", "PUB\n", CodeInvalid, whole},
		{"pub with an empty topic", "PUB \n", CodeBadTopic, whole},
		{"pub with two spaces", "PUB  t\n", CodeBadTopic, whole},
		{"pub topic too long", "PUB " + long + "\n" + u32(1) + "b", CodeBadTopic, 4 + 65 + 1},
		{"pub topic with a slash", "PUB a/b\n" + u32(1) + "b", CodeBadTopic, 8},
		{"pub topic of the suffix alone", "PUB #ephemeral\n", CodeBadTopic, whole},
		{"pub topic with another suffix", "PUB t#durable\n", CodeBadTopic, whole},
		{"pub empty", "PUB t\n" + u32(0), CodeBadMessage, whole},
		{"pub too large", "PUB t\n" + u32(65), CodeBadMessage, whole},
		{"pub of a negative size", "PUB t\n" + u32(math.MaxUint32), CodeBadMessage, whole},
		{"pub of the largest int32", "PUB t\n" + u32(math.MaxInt32), CodeBadMessage, whole},

		{"dpub without a delay", "DPUB t\n", CodeInvalid, whole},
		{"dpub with no number", "DPUB t soon\n", CodeInvalid, whole},
		{"dpub with an empty delay", "DPUB t \n", CodeInvalid, whole},
		{"dpub with a fraction", "DPUB t 1.5\n", CodeInvalid, whole},
		{"dpub below zero", "DPUB t -1\n", CodeInvalid, whole},
		{"dpub too late", "DPUB t 3600001\n", CodeInvalid, whole},
		{"dpub with an overflow", "DPUB t 99999999999999999999\n", CodeInvalid, whole},
		{"dpub topic", "DPUB a/b 1\n", CodeBadTopic, whole},
		{"dpub empty", "DPUB t 1\n" + u32(0), CodeBadMessage, whole},
		{"dpub too large", "DPUB t 1\n" + u32(65), CodeBadMessage, whole},

		{"mpub without a topic", "MPUB\n", CodeInvalid, whole},
		{"mpub topic", "MPUB a/b\n", CodeBadTopic, whole},
		{"mpub empty", "MPUB t\n" + u32(0), CodeBadBody, whole},
		{"mpub too large", "MPUB t\n" + u32(129), CodeBadBody, whole},
		{"mpub of no messages", "MPUB t\n" + sized(u32(0)), CodeBadBody, whole},
		{"mpub of no messages but bytes", "MPUB t\n" + sized(u32(0)+sized("a")), CodeBadBody, 15},
		{"mpub of more than fit", "MPUB t\n" + u32(8) + u32(25), CodeBadBody, whole},
		{"mpub count of a negative", "MPUB t\n" + sized(u32(math.MaxUint32)+sized("a")), CodeBadBody, 15},
		{"mpub with an empty message", "MPUB t\n" + sized(u32(2)+sized("abc")+u32(0)), CodeBadMessage, whole},
		{"mpub with a message too large", "MPUB t\n" + u32(8) + u32(1) + u32(65), CodeBadMessage, whole},
		{"mpub message of a negative size", "MPUB t\n" + u32(8) + u32(1) + u32(math.MaxUint32), CodeBadMessage, whole},
		{"mpub past the largest body", "MPUB t\n" + u32(8) + u32(2) + sized(strings.Repeat("x", 64)) + u32(53), CodeBadBody, whole},
		{"mpub past it with what has to follow", "MPUB t\n" + u32(8) + u32(3) + sized(strings.Repeat("x", 64)) + u32(48) + u32(1), CodeBadBody, whole},

		{"sub without arguments", "SUB\n", CodeInvalid, whole},
		{"sub without a channel", "SUB t\n", CodeInvalid, whole},
		{"sub topic", "SUB a/b c\n", CodeBadTopic, whole},
		{"sub channel", "SUB t a/b\n", CodeBadChannel, whole},
		{"sub empty channel", "SUB t \n", CodeBadChannel, whole},
		{"sub channel too long", "SUB t " + long + "\n", CodeBadChannel, whole},

		{"rdy with no number", "RDY many\n", CodeInvalid, whole},
		{"rdy below zero", "RDY -1\n", CodeInvalid, whole},
		{"rdy with a plus", "RDY +1\n", CodeInvalid, whole},
		{"rdy minus alone", "RDY -\n", CodeInvalid, whole},
		{"rdy too many", "RDY 101\n", CodeInvalid, whole},
		{"rdy with an overflow", "RDY 18446744073709551617\n", CodeInvalid, whole},

		{"fin without an id", "FIN\n", CodeInvalid, whole},
		{"fin with a short id", "FIN " + testID[1:] + "\n", CodeInvalid, whole},
		{"fin with a long id", "FIN " + testID + "0\n", CodeInvalid, whole},
		{"touch without an id", "TOUCH\n", CodeInvalid, whole},
		{"touch with a short id", "TOUCH 12\n", CodeInvalid, whole},
		{"req without arguments", "REQ\n", CodeInvalid, whole},
		{"req without a timeout", "REQ " + testID + "\n", CodeInvalid, whole},
		{"req with a short id", "REQ 12 1\n", CodeInvalid, whole},
		{"req with no number", "REQ " + testID + " soon\n", CodeInvalid, whole},
		{"req with an empty timeout", "REQ " + testID + " \n", CodeInvalid, whole},
		{"req with an overflow", "REQ " + testID + " 9999999999999999999\n", CodeInvalid, whole},
	} {
		t.Run(tc.name, func(t *testing.T) {
			at := tc.at
			if at == whole {
				at = len(tc.in)
			}
			cmd, n, need, err := ParseCommand([]byte(tc.in[:at]), testLimits())
			var e *Error
			if !errors.As(err, &e) {
				t.Fatalf("at %d bytes: n=%d need=%d err=%v, want %s", at, n, need, err, tc.code)
			}
			if e.Code != tc.code || !e.Fatal || e.Text == "" {
				t.Errorf("at %d bytes: %q fatal=%v, want a fatal %s with a text", at, e, e.Fatal, tc.code)
			}
			if n != 0 || need != 0 || commandDiff(cmd, Command{}) != "" {
				t.Errorf("an error came with n=%d need=%d cmd=%+v", n, need, cmd)
			}
			if _, n, need, err := ParseCommand([]byte(tc.in[:at-1]), testLimits()); n != 0 || need <= at-1 || err != nil {
				t.Errorf("at %d bytes: n=%d need=%d err=%v, want more bytes wanted", at-1, n, need, err)
			}
		})
	}
}

func TestParseCommandSaysHowMuchItNeeds(t *testing.T) {
	for _, tc := range []struct {
		in   string
		need int
	}{
		{"", 1},
		{"PU", 3},
		{"NOP\r", 5},
		{"PUB t\n", 10},
		{"PUB t\n\x00\x00\x00", 10},
		{"PUB t\n\x00\x00\x00\x05", 15},
		{"PUB t\n\x00\x00\x00\x05abcd", 15},
		{"IDENTIFY\n", 13},
		{"MPUB t\n\x00\x00\x00\x09", 15},
		{"MPUB t\n\x00\x00\x00\x09" + u32(3), 27}, // the size of each message
		{"MPUB t\n\x00\x00\x00\x09" + u32(3) + u32(50) + "xxxxxxxx", 77}, // the first message, and the sizes of the others
		{"MPUB t\n\x00\x00\x00\x09" + u32(1) + sized("abc")[:6], 22},
		{"DPUB t 1\n\x00\x00\x00\x40", 77},
		{strings.Repeat("x", MaxLine-1), MaxLine},
	} {
		cmd, n, need, err := ParseCommand([]byte(tc.in), testLimits())
		if n != 0 || need != tc.need || err != nil || commandDiff(cmd, Command{}) != "" {
			t.Errorf("%q: n=%d need=%d err=%v cmd=%+v, want need %d alone", tc.in, n, need, err, cmd, tc.need)
		}
	}
}

func TestMaxDeferTimeoutStandsApartFromMaxReqTimeout(t *testing.T) {
	lim := testLimits()
	lim.MaxDeferTimeout = 2 * time.Hour
	if cmd, _, _, err := ParseCommand([]byte("DPUB t 7200000\n"+sized("b")), lim); err != nil || cmd.Delay != 2*time.Hour {
		t.Errorf("DPUB of 2h under a limit of 2h: delay %v, %v", cmd.Delay, err)
	}
	if _, _, _, err := ParseCommand([]byte("DPUB t 7200001\n"+sized("b")), lim); err == nil {
		t.Error("DPUB past 2h was taken")
	}
	if cmd, _, _, err := ParseCommand([]byte("REQ "+testID+" 7200000\n"), lim); err != nil || cmd.Delay != time.Hour {
		t.Errorf("REQ of 2h under a limit of 1h: delay %v, %v", cmd.Delay, err)
	}
}

func TestParseMagic(t *testing.T) {
	for _, tc := range []struct {
		in   string
		n    int
		code ErrorCode
	}{
		{"", 0, ""},
		{"  V", 0, ""},
		{"  V2", 4, ""},
		{"  V2NOP\n", 4, ""},
		{"  V1", 0, CodeBadProtocol},
		{"GET / HTTP/1.1", 0, CodeBadProtocol},
		{"\x16\x03\x01\x02", 0, CodeBadProtocol},
	} {
		n, err := ParseMagic([]byte(tc.in))
		var e *Error
		if errors.As(err, &e); n != tc.n || (e == nil) != (tc.code == "") || e != nil && (e.Code != tc.code || !e.Fatal) {
			t.Errorf("%q: n=%d err=%v, want n=%d code %q", tc.in, n, err, tc.n, tc.code)
		}
	}
}

func TestBatchGivesItsMessagesInOrder(t *testing.T) {
	bodies := []string{"a", "bc", "\n", strings.Repeat("x", 64)}
	var list [][]byte
	sum := 0
	for _, b := range bodies {
		list = append(list, []byte(b))
		sum += len(b)
	}
	in := AppendMpub(nil, "t", list)
	cmd, n, _, err := ParseCommand(in, testLimits())
	if err != nil || n != len(in) {
		t.Fatalf("n=%d of %d, %v", n, len(in), err)
	}
	if cmd.Batch.Len() != len(bodies) || cmd.Batch.Bytes() != sum {
		t.Errorf("Len %d, Bytes %d, want %d and %d", cmd.Batch.Len(), cmd.Batch.Bytes(), len(bodies), sum)
	}
	i := 0
	cmd.Batch.Each(func(b []byte) {
		if string(b) != bodies[i] {
			t.Errorf("message %d is %q, want %q", i, b, bodies[i])
		}
		if cap(b) != len(b) {
			t.Errorf("message %d can be appended into the next one", i)
		}
		i++
	})
	if i != len(bodies) {
		t.Errorf("Each gave %d messages of %d", i, len(bodies))
	}
	var none Batch
	none.Each(func([]byte) { t.Error("the zero Batch holds a message") })
	if none.Len() != 0 || none.Bytes() != 0 {
		t.Errorf("the zero Batch has Len %d, Bytes %d", none.Len(), none.Bytes())
	}
}

// An HTTP body has the same bytes without the size of a command, and ends.
func TestParseBatchIsMpubsOwnCheck(t *testing.T) {
	for _, body := range []string{
		u32(2) + sized("abc") + sized("d"),
		"", "abc", u32(0), u32(2) + sized("abcdefgh"), u32(1) + sized("a") + "b",
		u32(1) + u32(0) + "a", u32(1) + sized(strings.Repeat("x", 65)), u32(2) + sized("abc") + u32(2) + "d", u32(26),
	} {
		want, _, wantCode := reference([]byte("MPUB t\n"+u32(1)+body), testLimits())
		switch {
		case wantCode != "" || want.messages != nil:
		case len(body) < 4:
			wantCode = CodeBadBody
		default:
			wantCode = CodeBadMessage
		}
		got, err := ParseBatch([]byte(body), testLimits())
		var e *Error
		if errors.As(err, &e); (e == nil) != (wantCode == "") || e != nil && (e.Code != wantCode || got.Len() != 0) {
			t.Errorf("%q: %v with %d messages, want code %q", body, err, got.Len(), wantCode)
		}
		if err == nil && got.Len() != len(want.messages) {
			t.Errorf("%q: %d messages, want %d", body, got.Len(), len(want.messages))
		}
	}
}

// The parser looks once at each message of a batch that comes byte by byte. A client must not make the broker scan a
// million messages for every byte.
func TestMpubIsGoneThroughOnce(t *testing.T) {
	const messages = 20
	in := []byte("MPUB t\n" + u32(1) + u32(messages) + strings.Repeat(sized("b"), messages))
	lim := testLimits()
	var c Command
	var seen Walk
	for k := range in {
		if n, _, err := c.Parse(in[:k:k], &lim, &seen); n != 0 || err != nil {
			t.Fatalf("at %d bytes: n=%d, %v", k, n, err)
		}
	}
	testkit.MustEqual(t, seen, (Walk{n: messages, end: 4 + 5*messages}), "a byte before the end")
	clear(in[15:]) // the parser does not look at parsed bytes again
	n, _, err := c.Parse(in, &lim, &seen)
	if n != len(in) || err != nil || c.Batch.Len() != messages || seen != (Walk{}) {
		t.Fatalf("n=%d of %d, %v, %d messages, %+v", n, len(in), err, c.Batch.Len(), seen)
	}
}

func TestVerbStrings(t *testing.T) {
	seen := map[string]Verb{}
	for v := VerbIdentify; v <= VerbPace; v++ {
		s := v.String()
		if other, dup := seen[s]; dup || s == "" {
			t.Errorf("verbs %d and %d are both %q", other, v, s)
		}
		seen[s] = v
	}
	if len(seen) != 13 || VerbNone.String() != "" || (VerbPace+1).String() != "" {
		t.Errorf("%d verbs, none %q, past the last %q", len(seen), VerbNone, VerbPace+1)
	}
}

func TestPeekVerb(t *testing.T) {
	for v := VerbIdentify; v <= VerbCls; v++ {
		for _, rest := range []string{"\n", "\r\n", " a b\n", " \n\x00\xff"} {
			if got := PeekVerb([]byte(v.String() + rest)); got != v {
				t.Errorf("%q: %v", v.String()+rest, got)
			}
		}
	}
	for _, in := range []string{"", "PUB", "PUB t", "\n", " PUB t\n", "pub t\n", "PUBLISH t\n", "PUB\x00\n", strings.Repeat("x", MaxLine) + "\n"} {
		testkit.Equal(t, PeekVerb([]byte(in)), VerbNone, "%q", in)
	}
}

// IDENTIFY and AUTH above MaxIdentityBody are refused as soon as their size is there, for any limit of MPUB.
func TestIdentityBodyIsBounded(t *testing.T) {
	limits := DefaultLimits()
	for _, verb := range []string{"IDENTIFY", "AUTH"} {
		if _, _, need, err := ParseCommand([]byte(verb+"\n"+u32(MaxIdentityBody)), limits); err != nil || need != len(verb)+1+sizeLength+MaxIdentityBody {
			t.Errorf("%s of the maximum size: need %d, %v", verb, need, err)
		}
		_, _, _, err := ParseCommand([]byte(verb+"\n"+u32(MaxIdentityBody+1)), limits)
		if want := "E_BAD_BODY " + verb + " body of 65537 bytes is outside [1, 65536]"; err == nil || err.Error() != want {
			t.Errorf("%s of one byte more: %v, want %s", verb, err, want)
		}
	}
}
