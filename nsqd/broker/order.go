package broker

import (
	"errors"
	"fmt"
	"slices"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/metadata"
)

// An order changes what is recorded of a topic beside its messages. The metadata file has the
// order first, and the order takes effect after that. So a crash undoes no order that was
// answered, and an order that cannot be stored changes nothing. The design that lost applies
// the order first and undoes it if it cannot be stored: what a deletion, or a release after
// the end of a pause, has done cannot be undone.

// edit changes the record of a topic. It returns false if the topic is not to be recorded.
type edit func(*metadata.Topic) (keep bool)

// orders are the orders of a topic that are being stored.
type orders struct {
	edits []*edit // guarded by runner.mu
}

// edited applies the orders that are being stored to the record of the topic.
// Requires: runner.mu held.
func (o *orders) edited(m *metadata.Topic) (keep bool) {
	for _, e := range o.edits {
		if !(*e)(m) {
			return false
		}
	}
	return true
}

// record has the metadata file say what an order will make of the topic. The caller calls
// forgetEdit after that, also after an error.
// Error: ErrStorage; the caller must not carry out the order.
func (t *Topic) record(e *edit) error {
	t.mu.Lock()
	t.edits = append(t.edits, e)
	t.mu.Unlock()
	t.shared.recorded()
	return t.shared.Recorded()
}

// forgetEdit ends an order. It reports whether the metadata file may differ from the topic:
// since the order was not carried out, or since others were stored meanwhile, which may
// take effect in another order. Requires: mu held.
func (t *Topic) forgetEdit(e *edit, carriedOut bool) (differs bool) {
	t.edits = slices.DeleteFunc(t.edits, func(o *edit) bool { return o == e })
	return !carriedOut || len(t.edits) > 0
}

// ordered stores an order, and then carries it out by apply, in one step. After an error
// nothing has changed. Errors: ErrStorage; that of apply.
func (t *Topic) ordered(e edit, apply func(now mono.Time, s *step) error) error {
	var err error
	recordable := t.shared.metadataWriter != nil && !wire.Ephemeral(t.name)
	if recordable {
		err = t.record(&e)
	}
	s := t.begin()
	if err == nil {
		err = apply(t.shared.now(), s)
	}
	if recordable {
		differs := t.forgetEdit(&e, err == nil)
		s.stored, s.record = !differs, differs
	}
	t.end(s)
	return err
}

// orderedChannel is ordered for a channel that exists. Errors: ErrUnknownChannel, ErrDraining, ErrAway, ErrStorage.
func (t *Topic) orderedChannel(name string, e func(c *metadata.Channel) (keep bool), apply channelStep) error {
	if err := t.hasChannel(name); err != nil {
		return err
	}
	if wire.Ephemeral(name) {
		return t.onChannel(name, apply)
	}
	return t.ordered(func(m *metadata.Topic) bool {
		m.Channels = slices.DeleteFunc(slices.Clone(m.Channels), func(c metadata.Channel) bool { return c.Name == name && !e(&c) })
		for i := range m.Channels {
			if m.Channels[i].Name == name {
				e(&m.Channels[i])
			}
		}
		return true
	}, func(now mono.Time, s *step) error { return t.channelStep(now, name, s, apply) })
}

// hasChannel returns why no order for the channel can be carried out; nil: it can.
func (t *Topic) hasChannel(name string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, err := t.orderable(name)
	return err
}

// movable returns why the cursor of a channel cannot be moved by an order; nil: it can.
func (t *Topic) movable(channel string) error {
	if err := t.hasChannel(channel); err != nil {
		return err
	}
	return t.store.storable()
}

// Recorded returns when the topics and channels, what is paused, and the
// contracts, as they were when it was called, will be the same after a crash:
// the client that gave an order may then be told that it is carried out.
// Error: ErrStorage, if the metadata file could not be written since.
func (s *shared) Recorded() error {
	if s.metadataWriter == nil {
		return nil
	}
	if err := s.metadataWriter.wait(); err != nil {
		return fmt.Errorf("%w: %w", ErrStorage, err)
	}
	return nil
}

// storable reports whether the topic's cursors can be stored now, by storing them: an order
// that moves a cursor is carried out only if they can. A nil store has nothing to store.
// Error: ErrStorage.
func (st *store) storable() error {
	if st == nil {
		return nil
	}
	_, err := st.settle(true)
	return st.settledAs(err)
}

// settled returns when what the topic's channels are done with will be so after a crash. A
// nil store has nothing to settle. Error: ErrStorage.
func (st *store) settled() error {
	if st == nil {
		return nil
	}
	tried, err := st.settle(false)
	if !tried {
		return nil
	}
	return st.settledAs(err)
}

func (st *store) settledAs(err error) error {
	if errors.Is(err, commitlog.ErrClosed) { // with the topic, whose end stores them, or removes them
		return nil
	}
	st.noted(saving, err) // the store saves them again soon, and trims
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStorage, err)
	}
	return nil
}
