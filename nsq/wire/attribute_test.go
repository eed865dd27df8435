package wire

import (
	"bytes"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestAttributesAreCutAsTheyWereAppended(t *testing.T) {
	for _, n := range []int{0, 1, 17, MaxAttribute} {
		attribute := bytes.Repeat([]byte("a"), n)
		for _, body := range []string{"", "body"} {
			prefixed := append(AppendAttribute(nil, attribute), body...)
			a, payload, ok := CutAttribute(prefixed)
			if !ok || !bytes.Equal(a, attribute) || string(payload) != body {
				t.Errorf("%d bytes and %q: %q, %q, %v", n, body, a, payload, ok)
			}
			frame := AppendAttributed([]byte("x"), &Message{Timestamp: 1, Attempts: 2, ID: MessageID([]byte(testID)), Body: []byte(body)}, attribute)
			want := AppendMessage([]byte("x"), 1, 2, MessageID([]byte(testID)), prefixed)
			testkit.Equal(t, string(frame), string(want))
		}
	}
	for _, short := range []string{"", "\x01", "\x05abcd"} {
		if _, _, ok := CutAttribute([]byte(short)); ok {
			t.Errorf("%q is shorter than its attribute", short)
		}
	}
}

// A parsed message has its whole attribute, and its payload is within the limit.
func FuzzAttributes(f *testing.F) {
	seedCommands(f)
	f.Add(AppendPub(nil, "t", []byte("\x01abody")))
	f.Add(AppendPub(nil, "t", []byte("\x05abc")))
	f.Add(AppendMpub(nil, "t", [][]byte{[]byte("\x01abody"), {0}}))
	f.Add(AppendMpub(nil, "t", [][]byte{{0}, {1}}))
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) > fuzzCap {
			return
		}
		lim := testLimits()
		lim.Attributes = true
		cmd, n, need, _ := ParseCommand(in, lim)
		if need > lim.MaxCommandSize() {
			t.Fatalf("%d bytes needed", need)
		}
		check := func(body []byte) {
			if _, payload, ok := CutAttribute(body); !ok || len(payload) > lim.MaxMessageSize {
				t.Fatalf("accepted %q", body)
			}
		}
		if n > 0 && (cmd.Verb == VerbPub || cmd.Verb == VerbDpub) {
			check(cmd.Body)
		}
		cmd.Batch.Each(check)
		checkPrefixes(t, in, lim)
	})
}
