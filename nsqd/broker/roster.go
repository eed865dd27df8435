package broker

import (
	"encoding/binary"
	"errors"
	"maps"
	"slices"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/nsqd/metadata"
)

// roster is the control plane's knowledge of a topic and its channels. The metadata file
// has the same data. But a replicated log survives the metadata file: another broker takes
// the log over, or the broker returns with an empty disk. Therefore the roster precedes the
// cursors in the snapshot of a replicated log. Without the roster, a channel that was
// deleted in the meantime would look unknown to the control plane, and would reappear.
//
// Format, in varints except for names and the version:
//
//	version 0xC1
//	the topic's identity: log, created
//	number of confirmed channels; for each: length of the name, name, and the
//	catalog's version at which the channel was created
type roster struct {
	identity metadata.Identity
	created  map[string]uint64 // by channel; above 0
}

const rosterVersion = 0xC1

var errRoster = errors.New("not a snapshot of a replicated log's cursors")

// appendRoster encodes the roster. Requires: mu held.
func (cs *channelSet) appendRoster(b []byte) []byte {
	b = append(b, rosterVersion)
	b = binary.AppendUvarint(b, cs.identity.Log)
	b = binary.AppendUvarint(b, cs.identity.Created)
	known := 0
	for _, is := range cs.memberships {
		if is.created > 0 {
			known++
		}
	}
	b = binary.AppendUvarint(b, uint64(known))
	for _, name := range slices.Sorted(maps.Keys(cs.memberships)) {
		if is := cs.memberships[name]; is.created > 0 {
			b = binary.AppendUvarint(b, uint64(len(name)))
			b = append(b, name...)
			b = binary.AppendUvarint(b, is.created)
		}
	}
	return b
}

// parseRoster returns the roster, and the snapshot of the cursors that follows.
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

// outlived reports whether the control plane has deleted a channel of the roster. A new
// channel with the same name may exist.
func (r roster) outlived(channel string, order *srtmv1.TakeOver) bool {
	created, now := r.created[channel], order.GetIdentity()
	if created == 0 || r.identity != (metadata.Identity{Log: now.GetLog(), Created: now.GetCreated()}) {
		return false // versions of another log or another topic are not comparable
	}
	for _, c := range order.GetChannels() {
		if c.GetName() == channel {
			return c.GetCreated() > created
		}
	}
	return created <= order.GetChannelsVersion()
}

// restoreRoster restores the roster of a topic without a record. Requires: mu held.
func (cs *channelSet) restoreRoster(r roster) {
	if cs.identity == (metadata.Identity{}) {
		cs.identity = r.identity
	}
	if cs.identity.Log != r.identity.Log {
		return // the topic was prepared by another log in the meantime
	}
	for name, created := range r.created {
		if cs.runner.mu.core.Channel(name) != nil && cs.memberships[name].created == 0 {
			cs.note(name, membership{created: created})
		}
	}
}
