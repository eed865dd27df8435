package broker

import (
	"bytes"
	"maps"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/metadata"
)

// appendRoster writes the same bytes that parseRoster reads, and parseRoster refuses all others.
func FuzzRoster(f *testing.F) {
	known := channelSet{runner: new(runner), identity: metadata.Identity{Log: 7, Created: 300}, memberships: map[string]membership{"c": {created: 301}, "own": {}, "d": {created: 9}}}
	f.Add(known.appendRoster(nil))
	f.Add(append(known.appendRoster(nil), 2, 0, 0, 0))
	f.Add((&channelSet{}).appendRoster(nil))
	f.Add([]byte{rosterVersion, 1, 1, 2, 1, 'c', 1})
	f.Add([]byte{2, 0, 0, 0})
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		r, cursors, err := parseRoster(b)
		if err != nil {
			if cursors != nil || r.created != nil {
				t.Fatalf("%v, and %v with %x", err, r, cursors)
			}
			return
		}
		topic := channelSet{runner: new(runner), identity: r.identity}
		for name, created := range r.created {
			topic.setMembership(name, membership{created: created})
		}
		again, rest, err := parseRoster(append(topic.appendRoster(nil), cursors...))
		testkit.NoError(t, err)
		maps.DeleteFunc(r.created, func(_ string, created uint64) bool { return created == 0 })
		if again.identity != r.identity || !maps.Equal(again.created, r.created) || !bytes.Equal(rest, cursors) {
			t.Fatalf("%v with %x became %v with %x", r, cursors, again, rest)
		}
	})
}
