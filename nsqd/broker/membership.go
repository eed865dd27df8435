package broker

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/metadata"
	"github.com/srtm-io/srtm/nsqd/queue"
)

// In a cluster, the control plane's catalog owns a topic's durable channels. become and
// change adjust the topic's channels to the catalog. confirm reports a channel that a
// client creates here.

// membership is the control plane's knowledge of a durable channel.
type membership struct {
	// created is the catalog's version at which the channel was created; 0: the control
	// plane has not confirmed the channel.
	created uint64
	// settled: all connected brokers of the topic had the channel at the time of the
	// report.
	settled bool
}

// confirm reports a durable channel, unless all brokers of the topic are known to have it.
// Error: ErrTooManyChannels. Other failures are ignored: the channel exists here, and the
// control plane learns of it in the next session.
func (cs *channelSet) confirm(channel string) error {
	report := cs.runner.shared.cfg.Confirm
	if report == nil || wire.Ephemeral(channel) || wire.Ephemeral(cs.runner.name) {
		return nil
	}
	cs.runner.mu.Lock()
	member := cs.memberships[channel]
	cs.runner.mu.Unlock()
	if member.settled {
		return nil
	}
	if err := report(cs.runner.name, channel, member.created); errors.Is(err, ErrTooManyChannels) {
		return fmt.Errorf("channel %q of topic %q: %w", channel, cs.runner.name, err)
	}
	return nil
}

// discardUnknown removes a channel that the control plane refused, unless the channel has
// another consumer.
func (cs *channelSet) discardUnknown(channel string) {
	_ = cs.runner.onChannel(channel, func(now mono.Time, c *queue.Channel, s *step) {
		if c.Consumers().Len() == 0 && cs.memberships[channel].created == 0 {
			cs.removeChannel(now, c, s)
		}
	}) // an error means that the channel is gone
}

// markSettled records that all connected brokers of the topic have these channels.
func (cs *channelSet) markSettled(channels []string) {
	cs.runner.mu.Lock()
	defer cs.runner.mu.Unlock()
	for _, name := range channels {
		if member, exists := cs.memberships[name]; exists {
			cs.setMembership(name, membership{member.created, true})
		}
	}
}

// setMembership records a membership. Requires: mu held.
func (cs *channelSet) setMembership(channel string, member membership) {
	if cs.memberships == nil {
		cs.memberships = map[string]membership{}
	}
	changed := cs.memberships[channel].created != member.created
	if cs.memberships[channel] = member; changed {
		cs.rosterChanged()
	}
}

// rosterChanged makes the store save the roster. Requires: mu held.
func (cs *channelSet) rosterChanged() {
	if cs.store != nil && cs.store.roster != nil {
		cs.runner.mu.core.Log().MarkChanged()
	}
}

// restoreMembership restores the membership of a channel from an earlier process.
func (cs *channelSet) restoreMembership(channel string, created uint64) {
	if created == 0 {
		return
	}
	cs.runner.mu.Lock()
	defer cs.runner.mu.Unlock()
	cs.setMembership(channel, membership{created, true})
}

// adoptCatalog gives the topic the channels of the catalog at the given version. It returns the
// channels that the control plane does not know. Errors: ErrBadName, ErrGone, ErrDraining.
func (cs *channelSet) adoptCatalog(all []*srtmv1.TopicChannel, version uint64) (unknown []*srtmv1.TopicChannel, changed bool, err error) {
	wanted := make(map[string]bool, len(all))
	for _, c := range all {
		wanted[c.GetName()] = true
	}
	var deleted []string
	cs.runner.mu.Lock()
	for _, c := range cs.runner.mu.core.Channels() {
		if !wanted[c.Name()] && !wire.Ephemeral(c.Name()) {
			deleted = append(deleted, c.Name())
		}
	}
	identity := cs.identity
	cs.runner.mu.Unlock()
	if changed, err = cs.change(identity, all, deleted, version); err != nil {
		return nil, changed, err
	}
	cs.runner.mu.Lock()
	defer cs.runner.mu.Unlock()
	for _, c := range cs.runner.mu.core.Channels() {
		if !wanted[c.Name()] && !wire.Ephemeral(c.Name()) {
			unknown = append(unknown, &srtmv1.TopicChannel{Name: c.Name(), Paused: c.Paused()})
		}
	}
	return unknown, changed, nil
}

// change creates and pauses channels according to the catalog, and deletes channels that
// the catalog does not have at the given version. A channel that was deleted and created
// anew loses its messages. change keeps
//   - a channel without a confirmation by the control plane: the deletion concerns an
//     earlier channel;
//   - a channel of a later version: the catalog's store has been rolled back.
//
// change does nothing if the topic has another identity. Each change is an order (see
// orders): first the deletions, then the rest. After an error only the deletions may have
// happened. The caller makes only one change of a topic at a time.
//
// Errors: ErrBadName, ErrGone, ErrDraining, ErrStorage.
func (cs *channelSet) change(identity metadata.Identity, channels []*srtmv1.TopicChannel, deleted []string, version uint64) (changed bool, err error) {
	for _, c := range channels {
		if !wire.ValidChannelName(c.GetName()) {
			return false, fmt.Errorf("channel %q: %w", c.GetName(), ErrBadName)
		}
	}
	w := catalogChange{identity: identity, channels: channels, createdBefore: make(map[string]uint64, len(channels)+len(deleted))}
	for _, c := range channels {
		w.createdBefore[c.GetName()] = c.GetCreated()
	}
	for _, name := range deleted {
		w.createdBefore[name] = version + 1
	}
	outlived, differs, err := cs.compare(&w)
	if err != nil {
		return false, err
	}
	if outlived {
		if err := cs.store.storable(); err != nil {
			return false, err
		}
		if err := cs.orders.ordered(w.dropFrom, func(now mono.Time, s *step) error { return cs.removeOutlived(&w, now, s) }); err != nil {
			return false, err
		}
		if err := cs.store.settled(); err != nil { // otherwise, after a crash, a new channel of this name would get the old messages
			return true, err
		}
	}
	if differs {
		err = cs.orders.ordered(w.writeTo, func(now mono.Time, s *step) error { return cs.applyChange(&w, now, s) })
	}
	return outlived || differs, err
}

// catalogChange is the catalog's state of a topic's channels.
type catalogChange struct {
	identity      metadata.Identity
	channels      []*srtmv1.TopicChannel
	createdBefore map[string]uint64 // by name: delete the channel if it was created before this version
}

// outlives reports whether to delete a channel that was created at the given version.
func (w *catalogChange) outlives(name string, created uint64) bool {
	return created > 0 && created < w.createdBefore[name]
}

// dropFrom is the edit that deletes channels.
func (w *catalogChange) dropFrom(m *metadata.Topic) bool {
	if m.Identity == w.identity {
		m.Channels = slices.DeleteFunc(slices.Clone(m.Channels), func(c metadata.Channel) bool { return w.outlives(c.Name, c.Created) })
	}
	return true
}

// writeTo is the edit that creates and pauses channels.
func (w *catalogChange) writeTo(m *metadata.Topic) bool {
	if m.Identity != w.identity {
		return true
	}
	m.Channels = slices.Clone(m.Channels)
	for _, wanted := range w.channels {
		if wire.Ephemeral(wanted.GetName()) {
			continue
		}
		index, found := slices.BinarySearchFunc(m.Channels, wanted.GetName(), func(c metadata.Channel, name string) int { return strings.Compare(c.Name, name) })
		if !found {
			m.Channels = slices.Insert(m.Channels, index, metadata.Channel{})
		}
		m.Channels[index] = metadata.Channel{Name: wanted.GetName(), Paused: wanted.GetPaused(), Created: wanted.GetCreated()}
	}
	return true
}

// compare reports whether the topic has channels to delete, and whether anything else
// differs.
// Errors: ErrGone, ErrDraining.
func (cs *channelSet) compare(w *catalogChange) (outlived, differs bool, err error) {
	cs.runner.mu.Lock()
	defer cs.runner.mu.Unlock()
	if cs.runner.mu.closed {
		return false, false, cs.runner.open()
	}
	if cs.identity != w.identity {
		return false, false, nil
	}
	for name := range w.createdBefore {
		outlived = outlived || cs.runner.mu.core.Channel(name) != nil && w.outlives(name, cs.memberships[name].created)
	}
	for _, wanted := range w.channels {
		c := cs.runner.mu.core.Channel(wanted.GetName())
		created := cs.memberships[wanted.GetName()].created
		differs = differs || c == nil || c.Paused() != wanted.GetPaused() || created != wanted.GetCreated()
	}
	return outlived, differs, nil
}

// removeOutlived deletes the channels that the catalog has deleted. Requires: mu held.
func (cs *channelSet) removeOutlived(w *catalogChange, now mono.Time, s *step) error {
	if cs.runner.mu.closed {
		return cs.runner.open()
	}
	if cs.identity != w.identity {
		return nil
	}
	for name := range w.createdBefore {
		if c := cs.runner.mu.core.Channel(name); c != nil && w.outlives(name, cs.memberships[name].created) {
			cs.removeChannel(now, c, s)
		}
	}
	return nil
}

// applyChange creates and pauses channels. Requires: mu held.
func (cs *channelSet) applyChange(w *catalogChange, now mono.Time, s *step) error {
	if cs.runner.mu.closed {
		return cs.runner.open()
	}
	if cs.identity != w.identity {
		return nil
	}
	for _, wanted := range w.channels {
		c, err := cs.channel(now, wanted.GetName(), s, true)
		if err != nil {
			return err
		}
		switch {
		case wanted.GetPaused() && !c.Paused():
			c.Pause()
		case !wanted.GetPaused() && c.Paused():
			cs.runner.mu.core.UnpauseChannel(now, c, &s.fx)
		}
		if member := cs.memberships[c.Name()]; member.created != wanted.GetCreated() {
			cs.setMembership(c.Name(), membership{created: wanted.GetCreated()})
		}
	}
	return nil
}

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
	confirmed := 0
	for _, member := range cs.memberships {
		if member.created > 0 {
			confirmed++
		}
	}
	b = binary.AppendUvarint(b, uint64(confirmed))
	for _, name := range slices.Sorted(maps.Keys(cs.memberships)) {
		if member := cs.memberships[name]; member.created > 0 {
			b = binary.AppendUvarint(b, uint64(len(name)))
			b = append(b, name...)
			b = binary.AppendUvarint(b, member.created)
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
			cs.setMembership(name, membership{created: created})
		}
	}
}
