package replicated

import (
	"bytes"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsqd/commitlog"
)

func TestBlocksAreReadAsTheyWereWritten(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := head{owner: owner{rapid.Uint64().Draw(t, "epoch"), rapid.Uint64().Draw(t, "nonce")}}
		h.first = commitlog.Offset(rapid.Uint64Range(0, 1<<60).Draw(t, "first"))
		h.next = h.first
		var wrote []commitlog.Record
		for range rapid.IntRange(0, 5).Draw(t, "records") {
			r := commitlog.Record{
				Offset: h.next + commitlog.Offset(rapid.Uint64Range(0, 3).Draw(t, "hole")), Timestamp: mono.Wall(rapid.Int64().Draw(t, "time")),
				Body:    rapid.SliceOfN(rapid.Byte(), 0, 20).Draw(t, "body"),
				Channel: rapid.SliceOfN(rapid.Byte(), 0, 3).Draw(t, "channel"), Attribute: rapid.SliceOfN(rapid.Byte(), 0, 3).Draw(t, "attribute"),
			}
			h.attributes = h.attributes || len(r.Attribute) > 0
			wrote, h.next = append(wrote, r), r.Offset+1
		}
		b := h.append(nil)
		for i := range wrote {
			b = appendRecord(b, &wrote[i], h.first)
		}
		got, err := parseHead(b)
		if err != nil || got != h {
			t.Fatalf("%+v became %+v, %v", h, got, err)
		}
		read := slices.Collect(records(b, got))
		if len(read) != len(wrote) {
			t.Fatalf("of %d records %d are read", len(wrote), len(read))
		}
		for i, r := range read {
			if w := wrote[i]; r.Offset != w.Offset || r.Timestamp != w.Timestamp || !bytes.Equal(r.Body, w.Body) || !bytes.Equal(r.Channel, w.Channel) || !bytes.Equal(r.Attribute, w.Attribute) {
				t.Fatalf("%+v became %+v", w, r)
			}
		}
	})
}

// The log refuses foreign data in the stream, or reads the data within its bounds.
func FuzzBlock(f *testing.F) {
	h := head{owner: owner{1, 2}, first: 7, next: 9}
	b := appendRecord(h.append(nil), &commitlog.Record{Offset: 7, Body: []byte("body")}, 7)
	f.Add(b)
	f.Add(appendRecord(b, &commitlog.Record{Offset: 8, Channel: []byte("c")}, 7))
	f.Add(appendRecord(head{first: 7, next: 8, attributes: true}.append(nil), &commitlog.Record{Offset: 7, Attribute: []byte("a"), Body: []byte("body")}, 7))
	f.Add(cursorHead{chunks: 1, number: 2, saved: true}.append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		if h, err := parseHead(b); err == nil {
			at := h.first
			for r := range records(b, h) {
				if r.Offset < at || r.Offset >= h.next {
					t.Errorf("offset %d, after %d, in a block of %d to %d", r.Offset, at, h.first, h.next)
				}
				at = r.Offset + 1
			}
		}
		if h, body, err := parseCursorHead(b); err == nil {
			if again := append(h.append(nil), body...); !bytes.Equal(again[:32], b[:32]) {
				t.Errorf("%x became %x", b, again)
			}
		}
	})
}
