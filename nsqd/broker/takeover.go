package broker

import (
	"errors"
	"fmt"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/nsqd/replicated"
)

// ErrNotReplicated: the topic's log is only on this machine.
var ErrNotReplicated = errors.New("the topic is not replicated")

// TakeOver moves the messages of a lost broker into the topic: messages that waited for
// tokens wait again, and channels get their unfinished messages. Messages for channels that
// have been deleted since are left out. When TakeOver begins, the other broker can no
// longer store messages; when it ends, the other broker's log is removed. TakeOver returns
// the number of messages moved.
//
// Messages are stored here before they are removed there, so a crash duplicates at most one
// block of the log. After an error TakeOver may be called again, here or on another broker.
// Errors: ErrUnknownTopic, ErrNotReplicated, ErrDraining, ErrGone; errors of JetStream.
func (b *Broker) TakeOver(order *srtmv1.TakeOver) (n int, err error) {
	topic, from := order.GetTopic(), order.GetFromBrokerId()
	t, err := b.Topic([]byte(topic))
	if err != nil {
		return 0, err
	}
	if t.store == nil || t.store.storage().cfg.Replicated == nil {
		return 0, ErrNotReplicated
	}
	log, err := t.store.storage().cfg.Replicated.TakeOver(topic, from)
	if errors.Is(err, replicated.ErrNoPart) {
		return 0, nil // another broker has taken it over, or there was nothing
	}
	if err != nil {
		return 0, err
	}
	core, err := t.store.readUnfinished(log, order)
	if err == nil {
		n, err = b.takeOverMessages(t, core, log)
	}
	if err != nil {
		return n, fmt.Errorf("take topic %s over from broker %s: %w", topic, from, errors.Join(err, log.Close()))
	}
	return n, log.Remove()
}

// readUnfinished determines the unfinished messages of another broker's log.
func (st *store) readUnfinished(log *replicated.Log, order *srtmv1.TakeOver) (*queue.Topic, error) {
	left, err := st.readContents(log, log.Stats().First)
	core, fx := newMachine(), queue.Effects{}
	wanted := func(channel string) bool {
		return wire.ValidChannelName(channel) && !left.roster.outlived(channel, order)
	}
	_, _ = left.restore(core, st.runner.shared.now(), st.storage().current(), wanted, &fx) // readContents has reported a fault
	return core, err
}

// takeOverMessages appends the unfinished messages of another broker's log to the topic, and removes
// them there.
func (b *Broker) takeOverMessages(t *Topic, core *queue.Topic, log *replicated.Log) (n int, err error) {
	for _, c := range core.Channels() {
		if err := t.channels.createChannel(c.Name(), true); err != nil {
			return 0, err
		}
		// The control plane may not know a channel of the other broker. The channel is kept
		// even over the limit, since it contains acknowledged messages.
		_ = t.channels.confirm(c.Name())
	}
	var in incoming
	e := t.store.storage().current()
	return n, each(log, 0, func(batch *commitlog.Batch) error {
		in.of(core, e, batch.Records)
		if len(in.records) > 0 {
			end, err := t.store.takeIn(e, &in)
			if err != nil {
				return err
			}
			if err := b.settleFor(t, end); err != nil {
				return err
			}
			n += len(in.records)
		}
		return log.Trim(batch.Next)
	})
}

// incoming is a block of another broker's log: records and, for each released record, its
// channel.
type incoming struct {
	records []commitlog.Record
	undone  []queue.Undone // for a record that waits for its token: without a channel
	scratch []queue.Undone
}

func (in *incoming) of(core *queue.Topic, e *epoch, records []commitlog.Record) {
	in.records, in.undone = in.records[:0], in.undone[:0]
	for _, r := range records {
		var waits bool
		in.scratch, waits = core.Cursors().Undone(in.scratch[:0], queue.Offset(r.Offset), string(r.Channel))
		r.Offset = 0
		if waits {
			in.records, in.undone = append(in.records, r), append(in.undone, queue.Undone{})
		}
		for _, u := range in.scratch {
			k := r
			k.Channel, k.Access = []byte(u.Channel), max(1, r.Access)
			switch {
			case !u.Fresh:
				if k.Attempts, k.Due = u.Attempts, 0; u.Due > 0 {
					k.Due = e.wallOf(u.Due)
				}
			case r.Due > 0:
				u.Attempts, u.Due = r.Attempts, e.monoOf(r.Due)
			default:
				u.Attempts = r.Attempts
			}
			in.records, in.undone = append(in.records, k), append(in.undone, u)
		}
	}
}

// takeIn appends messages to the topic's log, and returns the end offset.
func (st *store) takeIn(e *epoch, in *incoming) (end commitlog.Offset, err error) {
	st.runner.storing.Lock()
	defer st.runner.storing.Unlock()
	st.runner.mu.Lock()
	err = st.runner.open()
	st.runner.mu.Unlock()
	if err != nil {
		return 0, err
	}
	log, err := st.ensure()
	if err != nil {
		return 0, err
	}
	first, err := st.epochs.append(log, e, in.records)
	if err != nil {
		return 0, err
	}
	s := st.runner.begin()
	st.runner.disk.used = true
	for i, u := range in.undone {
		offset := queue.Offset(first) + queue.Offset(i)
		if u.Channel == "" {
			st.runner.mu.core.Disk().Appended(st.runner.shared.now(), offset, &s.fx, st.runner.shared.restored(e, &in.records[i]))
		} else {
			st.runner.mu.core.Disk().TakenOver(st.runner.shared.now(), offset, in.undone[i:i+1], &s.fx)
		}
	}
	st.runner.end(s)
	return first + commitlog.Offset(len(in.records)), nil
}

// settleFor returns after the messages up to end are stored durably, with their channels.
// It retries while success is possible, since a second takeover would duplicate the
// messages.
func (b *Broker) settleFor(t *Topic, end commitlog.Offset) error {
	for {
		err := t.store.log.Load().Sync(end)
		if err == nil {
			_, err = t.store.settle(false)
		}
		t.runner.mu.Lock()
		gone := t.runner.open()
		t.runner.mu.Unlock()
		switch {
		case gone != nil:
			return gone
		case err == nil, errors.Is(err, commitlog.ErrClosed), errors.Is(err, replicated.ErrFenced):
			return err
		}
		select {
		case <-b.closing:
			return ErrDraining
		case <-time.After(spillRetry):
		}
	}
}

// yield deletes a topic that another broker has taken over, if a loaddistributor places
// topics. Publishers and consumers then look for the topic again.
func (b *Broker) yield(t *Topic) {
	if b.shared.cfg.AutoCreate || !b.has(t) {
		return
	}
	go func() {
		if b.has(t) && b.DeleteTopic(t.runner.name) == nil {
			b.shared.cfg.Storage.cfg.Log.Warn("another broker has taken the topic over; deleting the topic on this broker", obs.KeyTopic, t.runner.name)
		}
	}()
}

// yieldTaken deletes topics without a replicated log: other brokers have taken them over,
// or they never had a message. Called before the broker is used.
func (b *Broker) yieldTaken() error {
	if b.shared.cfg.AutoCreate || b.shared.cfg.Storage.cfg.Replicated == nil {
		return nil
	}
	for _, st := range b.stores() {
		if st.log.Load() != nil || st.runner.isUnavailable() {
			continue
		}
		if err := b.DeleteTopic(st.runner.name); err != nil {
			return err
		}
	}
	return nil
}
