package broker

import (
	"encoding/binary"
	"errors"
	"maps"
	"slices"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/nsqd/metadata"
)

// roster is what the control plane has said of a topic and its channels. The metadata file has
// the same, but a replicated log outlives that file: another broker takes the log over, or the
// same broker comes back with an empty disk. So the snapshot of a replicated log's cursors has the
// roster before it. Without the roster a channel that was deleted meanwhile looks like a channel
// of which the control plane has never heard, and comes back.
//
// In varints, but for names and the version:
//
//	version 0xC1
//	the topic's identity: log, created
//	channels that the control plane knows: number, and of each the length of the name, the name,
//	and the catalog's version at which the channel was created
type roster struct {
	identity metadata.Identity
	created  map[string]uint64 // by channel; above 0
}

const rosterVersion = 0xC1

var errRoster = errors.New("not a snapshot of a replicated log's cursors")

// appendRoster requires mu held.
func (t *Topic) appendRoster(b []byte) []byte {
	b = append(b, rosterVersion)
	b = binary.AppendUvarint(b, t.identity.Log)
	b = binary.AppendUvarint(b, t.identity.Created)
	known := 0
	for _, is := range t.memberships {
		if is.created > 0 {
			known++
		}
	}
	b = binary.AppendUvarint(b, uint64(known))
	for _, name := range slices.Sorted(maps.Keys(t.memberships)) {
		if is := t.memberships[name]; is.created > 0 {
			b = binary.AppendUvarint(b, uint64(len(name)))
			b = append(b, name...)
			b = binary.AppendUvarint(b, is.created)
		}
	}
	return b
}

// parseRoster returns the roster, and the snapshot of the cursors, which follows.
func parseRoster(b []byte) (r roster, cursors []byte, err error) {
	if len(b) == 0 || b[0] != rosterVersion {
		return r, nil, errRoster
	}
	b = b[1:]
	number := func() uint64 {
		v, n := binary.Uvarint(b)
		if n <= 0 {
			err, b = errRoster, nil
			return 0
		}
		b = b[n:]
		return v
	}
	r.identity.Log, r.identity.Created = number(), number()
	r.created = map[string]uint64{}
	for n := number(); n > 0 && err == nil; n-- {
		length := number()
		if length > uint64(len(b)) {
			return roster{}, nil, errRoster
		}
		name := string(b[:length])
		b = b[length:]
		r.created[name] = number()
	}
	if err != nil {
		return roster{}, nil, err
	}
	return r, b, nil
}

// outlived reports whether the control plane has deleted a channel of the roster since, though
// it may have created another one of that name.
func (r roster) outlived(channel string, order *srtmv1.TakeOver) bool {
	created, now := r.created[channel], order.GetIdentity()
	if created == 0 || r.identity != (metadata.Identity{Log: now.GetLog(), Created: now.GetCreated()}) {
		return false // the versions of another log, and of another topic, say nothing
	}
	for _, c := range order.GetChannels() {
		if c.GetName() == channel {
			return c.GetCreated() > created
		}
	}
	return created <= order.GetChannelsVersion()
}

// restoreRoster is for a topic that no earlier process has recorded. Requires: mu held.
func (t *Topic) restoreRoster(r roster) {
	if t.identity == (metadata.Identity{}) {
		t.identity = r.identity
	}
	if t.identity.Log != r.identity.Log {
		return // it was prepared meanwhile, from another log
	}
	for name, created := range r.created {
		if t.mu.core.Channel(name) != nil && t.memberships[name].created == 0 {
			t.note(name, membership{created: created})
		}
	}
}
