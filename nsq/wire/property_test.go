package wire_test

import (
	"bytes"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsq/wire"
)

var (
	names  = rapid.StringMatching(`[.a-zA-Z0-9_-]{1,54}(#ephemeral)?`)
	bodies = rapid.SliceOfN(rapid.Byte(), 1, 200)
	ids    = rapid.Custom(func(t *rapid.T) (id wire.MessageID) {
		copy(id[:], rapid.StringMatching(`[0-9a-f]{16}`).Draw(t, "hex"))
		return id
	})
	delays = rapid.Custom(func(t *rapid.T) time.Duration {
		return time.Duration(rapid.Int64Range(0, 3_600_000).Draw(t, "ms")) * time.Millisecond
	})
)

// The server parses each command that a client encodes, in a stream of commands.
func TestCommandsRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		lim := wire.DefaultLimits()
		var stream []byte
		var want []wire.Command
		batches := map[int][][]byte{}
		for i := range rapid.IntRange(1, 12).Draw(t, "commands") {
			c := wire.Command{Verb: wire.Verb(rapid.IntRange(int(wire.VerbIdentify), int(wire.VerbCls)).Draw(t, "verb"))}
			switch c.Verb {
			case wire.VerbIdentify:
				c.Body = bodies.Draw(t, "body")
				stream = wire.AppendIdentify(stream, c.Body)
			case wire.VerbAuth:
				c.Body = bodies.Draw(t, "body")
				stream = wire.AppendAuth(stream, c.Body)
			case wire.VerbPub:
				c.Topic, c.Body = []byte(names.Draw(t, "topic")), bodies.Draw(t, "body")
				stream = wire.AppendPub(stream, string(c.Topic), c.Body)
			case wire.VerbMpub:
				c.Topic = []byte(names.Draw(t, "topic"))
				batches[i] = rapid.SliceOfN(bodies, 1, 5).Draw(t, "bodies")
				stream = wire.AppendMpub(stream, string(c.Topic), batches[i])
			case wire.VerbDpub:
				c.Topic, c.Body, c.Delay = []byte(names.Draw(t, "topic")), bodies.Draw(t, "body"), delays.Draw(t, "delay")
				stream = wire.AppendDpub(stream, string(c.Topic), c.Delay, c.Body)
			case wire.VerbSub:
				c.Topic, c.Channel = []byte(names.Draw(t, "topic")), []byte(names.Draw(t, "channel"))
				stream = wire.AppendSub(stream, string(c.Topic), string(c.Channel))
			case wire.VerbRdy:
				c.Ready = rapid.IntRange(0, lim.MaxRdy).Draw(t, "ready")
				stream = wire.AppendRdy(stream, c.Ready)
			case wire.VerbFin:
				c.ID = ids.Draw(t, "id")
				stream = wire.AppendFin(stream, c.ID)
			case wire.VerbReq:
				c.ID, c.Delay = ids.Draw(t, "id"), delays.Draw(t, "delay")
				stream = wire.AppendReq(stream, c.ID, c.Delay)
			case wire.VerbTouch:
				c.ID = ids.Draw(t, "id")
				stream = wire.AppendTouch(stream, c.ID)
			case wire.VerbNop:
				stream = wire.AppendNop(stream)
			case wire.VerbCls:
				stream = wire.AppendCls(stream)
			}
			want = append(want, c)
		}
		for i, w := range want {
			got, n, _, err := wire.ParseCommand(stream, lim)
			if err != nil || n == 0 {
				t.Fatalf("command %d, %v: n=%d, %v", i, w.Verb, n, err)
			}
			stream = stream[n:]
			var messages [][]byte
			got.Batch.Each(func(b []byte) { messages = append(messages, b) })
			if len(messages) != len(batches[i]) || got.Batch.Len() != len(batches[i]) {
				t.Fatalf("command %d: %d messages of %d", i, len(messages), len(batches[i]))
			}
			for j := range messages {
				if !bytes.Equal(messages[j], batches[i][j]) {
					t.Fatalf("command %d, message %d: %q, want %q", i, j, messages[j], batches[i][j])
				}
			}
			if got.Verb != w.Verb || !bytes.Equal(got.Topic, w.Topic) || !bytes.Equal(got.Channel, w.Channel) ||
				!bytes.Equal(got.Body, w.Body) || got.Delay != w.Delay || got.Ready != w.Ready || got.ID != w.ID {
				t.Fatalf("command %d: got %+v, want %+v", i, got, w)
			}
		}
		testkit.MustEqual(t, len(stream), 0, "bytes are left")
	})
}

// A client parses each message that the server encodes.
func TestMessagesRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := wire.Message{
			Timestamp: rapid.Int64().Draw(t, "timestamp"),
			Attempts:  rapid.Uint16().Draw(t, "attempts"),
			ID:        ids.Draw(t, "id"),
			Body:      rapid.SliceOf(rapid.Byte()).Draw(t, "body"),
		}
		frame := wire.AppendMessage(nil, want.Timestamp, want.Attempts, want.ID, want.Body)
		if len(frame) != wire.MessageFrameSize(len(want.Body)) {
			t.Fatalf("%d bytes, MessageFrameSize says %d", len(frame), wire.MessageFrameSize(len(want.Body)))
		}
		kind, data, n, err := wire.ParseFrame(frame, len(frame))
		if kind != wire.FrameMessage || n != len(frame) || err != nil {
			t.Fatalf("%v, n=%d of %d, %v", kind, n, len(frame), err)
		}
		got, err := wire.ParseMessage(data)
		if err != nil || got.Timestamp != want.Timestamp || got.Attempts != want.Attempts || got.ID != want.ID || !bytes.Equal(got.Body, want.Body) {
			t.Fatalf("got %+v, %v, want %+v", got, err, want)
		}
	})
}
