package wire_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/nsqio/go-nsq"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsq/wire"
)

var goldenID = wire.MessageID([]byte("0123456789abcdef"))

// goldenCommands returns the client's commands, appended to dst, with go-nsq's command for each.
func goldenCommands(t *testing.T, dst []byte) []struct {
	name   string
	ours   []byte
	theirs *nsq.Command
} {
	t.Helper()
	id := nsq.MessageID(goldenID)
	must := func(c *nsq.Command, err error) *nsq.Command {
		testkit.Must(t, err)
		return c
	}
	bodies := [][]byte{[]byte("one"), []byte("two\n")}
	return []struct {
		name   string
		ours   []byte
		theirs *nsq.Command
	}{
		{"IDENTIFY", wire.AppendIdentify(dst, []byte(`{"client_id":"a"}`)), must(nsq.Identify(map[string]any{"client_id": "a"}))},
		{"AUTH", wire.AppendAuth(dst, []byte("secret")), must(nsq.Auth("secret"))},
		{"PUB", wire.AppendPub(dst, "topic", []byte("body")), nsq.Publish("topic", []byte("body"))},
		{"DPUB", wire.AppendDpub(dst, "topic", 1500*time.Millisecond, []byte("body")), nsq.DeferredPublish("topic", 1500*time.Millisecond, []byte("body"))},
		{"MPUB", wire.AppendMpub(dst, "topic", bodies), must(nsq.MultiPublish("topic", bodies))},
		{"SUB", wire.AppendSub(dst, "topic", "channel#ephemeral"), nsq.Subscribe("topic", "channel#ephemeral")},
		{"RDY", wire.AppendRdy(dst, 2500), nsq.Ready(2500)},
		{"FIN", wire.AppendFin(dst, goldenID), nsq.Finish(id)},
		{"REQ", wire.AppendReq(dst, goldenID, 90*time.Second), nsq.Requeue(id, 90*time.Second)},
		{"TOUCH", wire.AppendTouch(dst, goldenID), nsq.Touch(id)},
		{"NOP", wire.AppendNop(dst), nsq.Nop()},
		{"CLS", wire.AppendCls(dst), nsq.StartClose()},
	}
}

func goldenFrames() []struct {
	name  string
	bytes []byte
} {
	return []struct {
		name  string
		bytes []byte
	}{
		{"OK", wire.AppendResponse(nil, wire.OK)},
		{"CLOSE_WAIT", wire.AppendResponse(nil, wire.CloseWait)},
		{"heartbeat", wire.AppendResponse(nil, wire.Heartbeat)},
		{"error", wire.AppendError(nil, wire.NewError(wire.CodeBadTopic, `PUB topic name "a/b" is not valid`))},
		{"rate limited", wire.AppendError(nil, wire.RateLimited(12*time.Millisecond))},
		{"message", wire.AppendMessage(nil, 1136214245000000000, 258, goldenID, []byte("body"))},
	}
}

func TestGoldenBytes(t *testing.T) {
	var b bytes.Buffer
	line := func(name string, raw []byte) { fmt.Fprintf(&b, "%-12s % x\n%-12s %+q\n", name, raw, "", raw) }
	line("magic", wire.AppendMagic(nil))
	for _, c := range goldenCommands(t, nil) {
		line(c.name, c.ours)
	}
	for _, f := range goldenFrames() {
		line(f.name, f.bytes)
	}
	testkit.Golden(t, "testdata/v2.golden", b.Bytes())
}

func TestCommandsAreGoNSQsByteForByte(t *testing.T) {
	if got := wire.AppendMagic(nil); !bytes.Equal(got, nsq.MagicV2) {
		t.Errorf("magic %q, go-nsq has %q", got, nsq.MagicV2)
	}
	prefix := []byte("already there")
	for _, c := range goldenCommands(t, slices.Clip(prefix)) {
		want := bytes.NewBuffer(slices.Clone(prefix))
		testkit.Result(c.theirs.WriteTo(want)).Must(t)
		if !bytes.Equal(c.ours, want.Bytes()) {
			t.Errorf("%s: %q, go-nsq has %q", c.name, c.ours, want.Bytes())
		}
	}
}

func TestGoNSQReadsOurFrames(t *testing.T) {
	for _, f := range goldenFrames() {
		kind, data, err := nsq.ReadUnpackedResponse(bytes.NewReader(f.bytes))
		if err != nil {
			t.Fatalf("%s: %v", f.name, err)
		}
		ourKind, ourData, n, err := wire.ParseFrame(f.bytes, 1024)
		if err != nil || n != len(f.bytes) || int32(ourKind) != kind || !bytes.Equal(ourData, data) {
			t.Errorf("%s: go-nsq reads type %d %q; we read %v %q, n=%d, %v", f.name, kind, data, ourKind, ourData, n, err)
		}
	}
	_, data, err := nsq.UnpackResponse(wire.AppendMessage(nil, 42, 258, goldenID, []byte("body"))[4:])
	testkit.Must(t, err)
	m := testkit.Result(nsq.DecodeMessage(data)).Must(t)
	if m.Timestamp != 42 || m.Attempts != 258 || m.ID != nsq.MessageID(goldenID) || string(m.Body) != "body" {
		t.Errorf("go-nsq reads the message as %+v", m)
	}
}

// Our JSON has the names of go-nsq's types.
func TestIdentifyResponseReadsAsGoNSQs(t *testing.T) {
	raw, err := json.Marshal(wire.IdentifyResponse{MaxRdyCount: 7, TLSv1: true, Deflate: true, Snappy: true, AuthRequired: true})
	testkit.Must(t, err)
	var theirs nsq.IdentifyResponse
	testkit.Must(t, json.Unmarshal(raw, &theirs))
	testkit.Equal(t, theirs, (nsq.IdentifyResponse{MaxRdyCount: 7, TLSv1: true, Deflate: true, Snappy: true, AuthRequired: true}), "go-nsq reads from %s", raw)
}
