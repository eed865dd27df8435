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

// An order changes the record of a topic, apart from its messages. The order is first
// written to the metadata file, and then takes effect. So a crash undoes no acknowledged
// order, and an order that cannot be stored changes nothing. The rejected design applies an
// order first and undoes it if it cannot be stored. But a deletion cannot be undone, and
// neither can releases after the end of a pause.

// edit changes the record of a topic. It returns false if the topic must not be recorded.
type edit func(*metadata.Topic) (keep bool)

// orders are a topic's orders that are being stored.
type orders struct {
	runner *runner // set once

	edits []*edit // guarded by runner.mu
}

// edited applies the pending orders to the topic's record.
// Requires: runner.mu held.
func (o *orders) edited(m *metadata.Topic) (keep bool) {
	for _, e := range o.edits {
		if !(*e)(m) {
			return false
		}
	}
	return true
}

// record writes the result of an order to the metadata file. Afterwards, also after an
// error, the caller must call forgetEdit.
// Error: ErrStorage; the caller must not execute the order.
func (o *orders) record(e *edit) error {
	o.runner.mu.Lock()
	o.edits = append(o.edits, e)
	o.runner.mu.Unlock()
	o.runner.shared.recorded()
	return o.runner.shared.Recorded()
}

// forgetEdit ends an order. It reports whether the metadata file may differ from the topic:
// the order was not executed, or other orders are pending, which may take effect in a
// different sequence. Requires: mu held.
func (o *orders) forgetEdit(e *edit, carriedOut bool) (differs bool) {
	o.edits = slices.DeleteFunc(o.edits, func(other *edit) bool { return other == e })
	return !carriedOut || len(o.edits) > 0
}

// ordered stores an order and then executes it with apply, in one step. After an error
// nothing has changed. Errors: ErrStorage; errors of apply.
func (o *orders) ordered(e edit, apply func(now mono.Time, s *step) error) error {
	var err error
	recordable := o.runner.shared.metadataWriter != nil && !wire.Ephemeral(o.runner.name)
	if recordable {
		err = o.record(&e)
	}
	s := o.runner.begin()
	if err == nil {
		err = apply(o.runner.shared.now(), s)
	}
	if recordable {
		differs := o.forgetEdit(&e, err == nil)
		s.stored, s.record = !differs, differs
	}
	o.runner.end(s)
	return err
}

// orderedChannel is ordered for an existing channel. Errors: ErrUnknownChannel,
// ErrDraining, ErrAway, ErrStorage.
func (o *orders) orderedChannel(name string, e func(c *metadata.Channel) (keep bool), apply channelStep) error {
	if err := o.hasChannel(name); err != nil {
		return err
	}
	if wire.Ephemeral(name) {
		return o.runner.onChannel(name, apply)
	}
	return o.ordered(func(m *metadata.Topic) bool {
		m.Channels = slices.DeleteFunc(slices.Clone(m.Channels), func(c metadata.Channel) bool { return c.Name == name && !e(&c) })
		for i := range m.Channels {
			if m.Channels[i].Name == name {
				e(&m.Channels[i])
			}
		}
		return true
	}, func(now mono.Time, s *step) error { return o.runner.channelStep(now, name, s, apply) })
}

// hasChannel returns an error if no order for the channel can be executed.
func (o *orders) hasChannel(name string) error {
	o.runner.mu.Lock()
	defer o.runner.mu.Unlock()
	_, err := o.runner.orderable(name)
	return err
}

// movable returns an error if an order cannot move the cursor of the channel.
func (t *Topic) movable(channel string) error {
	if err := t.orders.hasChannel(channel); err != nil {
		return err
	}
	return t.store.storable()
}

// Recorded returns after the current topics, channels, pauses and contracts are stored
// durably. Then the caller may acknowledge an order.
// Error: ErrStorage, if a write of the metadata file has failed since the call.
func (s *shared) Recorded() error {
	if s.metadataWriter == nil {
		return nil
	}
	if err := s.metadataWriter.wait(); err != nil {
		return fmt.Errorf("%w: %w", ErrStorage, err)
	}
	return nil
}

// storable stores the topic's cursors, and returns an error on failure. An order that moves
// a cursor is executed only if the cursors can be stored. A nil store has nothing to store.
// Error: ErrStorage.
func (st *store) storable() error {
	if st == nil {
		return nil
	}
	_, err := st.settle(true)
	return st.settledAs(err)
}

// settled returns after the finished messages of the topic's channels are recorded durably.
// A nil store has nothing to record. Error: ErrStorage.
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
	if errors.Is(err, commitlog.ErrClosed) { // closed with the topic, which stores or removes the cursors
		return nil
	}
	st.noted(saving, err) // the store soon saves again, and trims
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStorage, err)
	}
	return nil
}

// Recorded is shared.Recorded.
func (b *Broker) Recorded() error { return b.shared.Recorded() }
