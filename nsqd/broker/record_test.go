package broker

import (
	"bytes"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsqd/queue"
)

func TestRecordsGoThereAndBack(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		at := epoch{mono: stamp.Mono(rapid.Int64Range(0, 1e15).Draw(rt, "mono")), wall: stamp.Wall(rapid.Int64Range(1e18, 2e18).Draw(rt, "wall"))}
		m := &queue.Message{
			Body:      rapid.SliceOfN(rapid.Byte(), 0, 100).Draw(rt, "body"),
			Timestamp: stamp.Wall(rapid.Int64().Draw(rt, "timestamp")),
			Arrival: stamp.Arrival{
				At:     stamp.Mono(rapid.Int64Range(0, 1e15).Draw(rt, "arrival")),
				Source: stamp.Source(rapid.IntRange(0, stamp.Sources-1).Draw(rt, "source")),
			},
			Defer: time.Duration(rapid.Int64Range(0, 1e15).Draw(rt, "defer")),
		}
		copy(m.ID[:], rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(rt, "id"))
		released := rapid.Bool().Draw(rt, "released")
		if released {
			m.Access = time.Duration(rapid.Int64Range(0, 1e12).Draw(rt, "access"))
		}
		attempts := rapid.Uint16().Draw(rt, "attempts")
		b := appendRecord(nil, at, queue.Kept{Message: m, Attempts: attempts}, released)
		k, err := parseRecord(at, b, new(slab))
		if err != nil {
			rt.Fatal(err)
		}
		got := k.Message
		if got.ID != m.ID || !bytes.Equal(got.Body, m.Body) || got.Timestamp != m.Timestamp || got.Arrival != m.Arrival ||
			got.Defer != m.Defer || got.Access != m.Access || k.Attempts != attempts {
			rt.Fatalf("%+v became %+v", m, got)
		}
		clear(b) // what parse returned must not change with it
		if !bytes.Equal(got.Body, m.Body) {
			rt.Fatal("the body is a view of the record")
		}
	})
}

func FuzzParseRecord(f *testing.F) {
	at := epoch{mono: 1, wall: 2}
	f.Add(appendRecord(nil, at, queue.Kept{Message: &queue.Message{Body: []byte("x")}}, true))
	f.Add([]byte{})
	f.Add([]byte{recordVersion, 9})
	f.Fuzz(func(t *testing.T, b []byte) {
		k, err := parseRecord(at, b, new(slab))
		if (err == nil) != (k.Message != nil) {
			t.Fatalf("%+v and %v", k, err)
		}
		if err == nil && (len(k.Message.Body) != len(b)-recordHeader || k.Message.Defer < 0) {
			t.Fatalf("%+v of %d bytes", k.Message, len(b))
		}
	})
}
