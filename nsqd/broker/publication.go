package broker

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/queue"
)

// Published is a message as its publisher gave it.
type Published struct {
	Body    []byte // copied
	Arrival stamp.Arrival
	Defer   time.Duration
	// From is who published it, to this topic; nil: not known.
	From *Publisher
	// Stored is set to where the messages are, for Sync; nil: it is not wanted.
	Stored   *Stored
	admitted bool // by police
	// NoWait is for a caller who may not wait for the disk: it gets ErrBusy, and
	// the same call without NoWait does what it was to do.
	NoWait bool
}

// Publish accepts one message.
// Errors: queue.ErrFull, *queue.OverLimitError, ErrGone, ErrDraining, ErrBusy.
func (t *Topic) Publish(now mono.Time, wall mono.Wall, p Published) error {
	s := t.shared.steps.Get().(*step)
	s.msgs = append(s.msgs, t.shared.message(wall, &p))
	return t.put(now, s, p)
}

// Bodies is a sequence of message bodies, such as those of an MPUB.
type Bodies interface {
	Len() int
	Bytes() int // of all together
	Each(func(body []byte))
}

// A batch of more messages or bytes is large: who may not wait does not make
// messages of it, and others get a turn at processor and topic after each
// batchSlice of them.
const (
	largeBatch = 512
	largeBytes = 256 << 10
	batchSlice = 256
)

// PublishBatch accepts all the messages, or none. They are alike but for their
// bodies; p has none. Errors as for Publish.
func (t *Topic) PublishBatch(now mono.Time, wall mono.Wall, p Published, bodies Bodies) error {
	// A batch may be a million messages of one byte, of which copies take a
	// hundred times as much.
	if n := bodies.Len(); n > t.most {
		s := t.begin()
		defer t.end(s)
		if err := t.open(); err != nil {
			return err
		}
		return t.mu.core.Refuse(queue.ErrFull, n)
	}
	if bodies.Len() > largeBatch || bodies.Bytes() > largeBytes {
		return t.publishLarge(now, wall, p, bodies)
	}
	return t.publishBatch(now, wall, p, bodies)
}

func (t *Topic) publishBatch(now mono.Time, wall mono.Wall, p Published, bodies Bodies) error {
	s := t.shared.steps.Get().(*step)
	s.batch.like, s.batch.wall = p, wall
	bodies.Each(s.batch.gather)
	s.batch.like = Published{}
	return t.put(now, s, p)
}

// publishLarge makes nothing before it is known that there is room for it. What
// has to be in memory as a whole, since there is no disk behind it or it is
// stored by one write, counts as held from then on. Else the first slice is
// accepted or refused for all of the batch, and each one after it waits until
// the disk has taken those before; only the topic's deletion keeps it from coming,
// for Close waits.
func (t *Topic) publishLarge(now mono.Time, wall mono.Wall, p Published, bodies Bodies) (err error) {
	if p.NoWait {
		return ErrBusy
	}
	n, bytes := bodies.Len(), bodies.Bytes()+bodies.Len()*queue.Overhead
	whole := t.through || t.most < math.MaxInt
	s := t.begin()
	if err = t.takes(n); err == nil {
		err = t.mu.core.Admit(t.instant(now), 0, n, p.Arrival.At, p.Arrival.At)
	}
	if err == nil {
		err, p.admitted = t.mu.pacing.police(p.From, n, p.Arrival.At), true
	}
	if err == nil && whole {
		if t.mu.core.Tick(t.instant(now), &s.fx); t.tight(bytes) || !t.through && !t.mu.core.Room(n) {
			err = t.mu.core.Refuse(queue.ErrFull, n)
		}
	}
	t.end(s)
	if err != nil {
		return err
	}
	if whole {
		t.shared.large <- struct{}{}
		defer func() { <-t.shared.large }()
		if t.through {
			t.shared.held.Add(int64(bytes))
			defer t.shared.held.Add(-int64(bytes))
		}
		return t.publishBatch(now, wall, p, bodies)
	}
	t.shared.batches.RLock()
	defer t.shared.batches.RUnlock()
	s = t.shared.steps.Get().(*step)
	rest := false
	put := func() {
		<-t.shared.large
		n := len(s.msgs)
		if err = t.accept(now, s, p, rest); err == nil {
			t.metrics.arrived(p.Arrival.Source, n)
		}
		s, rest = t.shared.steps.Get().(*step), true
	}
	bodies.Each(func(body []byte) {
		if err != nil {
			return
		}
		if len(s.msgs) == 0 {
			t.shared.large <- struct{}{}
		}
		p.Body = body
		if s.msgs = append(s.msgs, t.shared.message(wall, &p)); len(s.msgs) == batchSlice {
			put()
		}
	})
	if len(s.msgs) > 0 {
		put()
	}
	t.discard(s)
	return err
}

// put accepts the step's messages, or none, and ends the step.
func (t *Topic) put(now mono.Time, s *step, p Published) error {
	n := len(s.msgs)
	var err error
	if t.through {
		if p.NoWait {
			for _, m := range s.msgs {
				t.shared.pool.put(m)
			}
			t.discard(s)
			return ErrBusy
		}
		err = t.publishThrough(s, p)
	} else {
		err = t.accept(now, s, p, false)
	}
	if err == nil {
		t.metrics.arrived(p.Arrival.Source, n)
	}
	return err
}

// takes is open for n messages that are published, which a log that is full refuses.
// Requires: mu held.
func (t *Topic) takes(n int) error {
	err := t.open()
	if err == nil && t.store.full() {
		err = t.mu.core.Refuse(queue.ErrFull, n)
	}
	return err
}

// accept puts the step's messages at the end of the topic's backlog in memory, and
// ends the step. With rest they belong to a batch of which the first part was
// accepted: then they are, unless the topic is gone.
func (t *Topic) accept(now mono.Time, s *step, p Published, rest bool) (err error) {
	bytes := 0
	for _, m := range s.msgs {
		bytes += m.Size()
	}
	open := func() error {
		if rest && !t.mu.closed {
			return nil
		}
		return t.open()
	}
	full := !rest && t.store.full()
	room := func() bool {
		t.mu.core.SetTight(t.tight(bytes))
		return t.mu.core.Room(len(s.msgs))
	}
	t.mu.Lock()
	// With a disk, a full backlog is one that is being written: the publisher
	// waits for that, unless writing fails.
	for !full && open() == nil && !room() && t.store.spilling() {
		if p.NoWait {
			err = ErrBusy
			break
		}
		t.room.Wait()
	}
	if err == nil {
		err = open()
	}
	if err == nil && !full && !p.admitted {
		err = t.mu.pacing.police(p.From, len(s.msgs), p.Arrival.At)
	}
	switch now = t.instant(now); {
	case err != nil:
	case full:
		err = t.mu.core.Refuse(queue.ErrFull, len(s.msgs))
	case rest:
		t.mu.core.Enter(now, &s.fx, s.msgs...)
	default:
		err = t.mu.core.Put(now, &s.fx, s.msgs...)
	}
	if err == nil {
		t.counted(p.From, len(s.msgs), p.Arrival.At)
		t.mu.pacing.tell(p.From, len(s.msgs), now)
	} else { // they are still ours
		s.fx.Free = append(s.fx.Free, s.msgs...)
	}
	t.end(s)
	return err
}

// PublishEach accepts messages one by one, in order, under one hold of the lock,
// and appends to errs what became of each: nil, or an error of Publish. It
// leaves off after ErrBusy or ErrGone, and answers ErrBusy where Publish waits:
// always, if the topic's messages go through the disk.
func (t *Topic) PublishEach(now mono.Time, wall mono.Wall, batch []Published, errs []error) []error {
	if t.through {
		return append(errs, ErrBusy)
	}
	s := t.shared.steps.Get().(*step)
	bytes := 0
	for i := range batch {
		m := t.shared.message(wall, &batch[i])
		s.msgs = append(s.msgs, m)
		bytes += m.Size()
	}
	dealt := len(errs)
	t.mu.Lock()
	now = t.instant(now)
	short := t.tight(bytes) // for some of the batch; which ones is looked at one by one
	t.mu.core.SetTight(short)
	if t.open() == nil && !t.store.full() && t.mu.core.Takes(len(s.msgs)) && !t.mu.pacing.policing() { // one step for all is cheaper
		t.mu.core.Enter(now, &s.fx, s.msgs...)
		errs = append(errs, make([]error, len(s.msgs))...)
	} else {
		for i, m := range s.msgs {
			err := t.takes(1)
			if short {
				t.mu.core.SetTight(t.tight(s.fx.Held + m.Size()))
			}
			// The store learns of what overflows here when the step ends.
			if err == nil && !t.mu.core.Room(1) && (t.store.spilling() || s.fx.Disk) {
				err = ErrBusy
			}
			if err == nil {
				err = t.mu.pacing.police(batch[i].From, 1, batch[i].Arrival.At)
			}
			if err == nil {
				err = t.mu.core.Put(now, &s.fx, m)
			}
			errs = append(errs, err)
			if err != nil {
				s.fx.Free = append(s.fx.Free, m)
			}
			if err == ErrBusy || err == ErrGone {
				s.fx.Free = append(s.fx.Free, s.msgs[i+1:]...)
				break
			}
		}
	}
	for i, n := 0, 1; dealt+i < len(errs); i, n = i+n, 1 {
		if errs[dealt+i] != nil {
			continue
		}
		p := &batch[i]
		for dealt+i+n < len(errs) && errs[dealt+i+n] == nil && batch[i+n].From == p.From && batch[i+n].Arrival == p.Arrival {
			n++ // of one segment
		}
		t.metrics.arrived(p.Arrival.Source, n)
		t.counted(p.From, n, p.Arrival.At)
	}
	if len(batch) > 0 {
		t.mu.pacing.tell(batch[0].From, len(batch), now)
	}
	t.end(s)
	return errs
}

// counted says that n messages were accepted that arrived together. Requires: mu held.
func (t *Topic) counted(from *Publisher, n int, at mono.Time) {
	if c := t.mu.capture; c != nil {
		c.add(from, at, n)
	}
	t.mu.pacing.counted(from, n, at)
}

func (b *shared) message(wall mono.Wall, p *Published) *queue.Message {
	m := b.pool.get(len(p.Body))
	m.ID = b.newID()
	m.Body = append(m.Body, p.Body...)
	m.Timestamp = wall
	m.Arrival, m.Source = p.Arrival.At, p.Arrival.Source
	m.Defer = p.Defer
	m.Only, m.Attempts, m.Offset = nil, 0, 0 // the log says at which, from its end on
	return m
}

// open reports why the topic takes no message. Requires: mu held.
func (t *Topic) open() error {
	switch {
	case t.shared.draining.Load(): // first: a publisher looks for a topic that is gone again
		return ErrDraining
	case t.mu.closed:
		return ErrGone
	}
	return nil
}

// batch makes messages of the bodies of one PublishBatch.
type batch struct {
	gather func(body []byte) // made once, since a closure is allocated
	like   Published
	wall   mono.Wall
}

// ErrStorage: the message could not be stored, for now.
var ErrStorage = errors.New("storage failed")

// publishThrough stores the step's messages at the end of the topic's log. They are
// accepted then, and durable after Sync. It ends the step.
func (t *Topic) publishThrough(s *step, p Published) error {
	t.storing.Lock()
	defer t.storing.Unlock()
	n := len(s.msgs)
	t.mu.Lock()
	t.mu.core.SetTight(t.tight(0))
	err := t.takes(n)
	if err == nil {
		err = t.mu.core.Admit(t.shared.now(), 0, n, p.Arrival.At, p.Arrival.At)
	}
	if err == nil && !p.admitted {
		err = t.mu.pacing.police(p.From, n, p.Arrival.At)
	}
	if err != nil { // they are still ours
		s.fx.Free = append(s.fx.Free, s.msgs...)
	} else {
		var end commitlog.Offset
		if end, err = t.writeThrough(s, s.msgs); p.Stored != nil {
			*p.Stored = Stored{end}
		}
		if err == nil {
			t.counted(p.From, n, p.Arrival.At)
			t.mu.pacing.tell(p.From, n, t.shared.now())
		}
	}
	t.end(s)
	return err
}

// writeThrough stores messages at the end of the topic's log by one write, which makes them
// accepted, and returns where they end there. Those that are refused are given back.
// Errors: ErrStorage. Requires: storing held, and mu, which it gives up meanwhile.
func (t *Topic) writeThrough(s *step, msgs []*queue.Message) (end commitlog.Offset, err error) {
	storage := t.shared.cfg.Storage
	records := storage.records.Get().(*[]commitlog.Record)
	for _, m := range msgs {
		*records = append(*records, storage.epoch.record(m, false))
	}
	t.mu.Unlock()
	first, err := t.store.append(*records)
	storage.putRecords(records)
	t.mu.Lock()
	t.mu.core.SetTight(t.tight(0))
	if err != nil {
		s.fx.Free = append(s.fx.Free, msgs...)
		return 0, t.mu.core.Refuse(fmt.Errorf("%w: %w", ErrStorage, err), len(msgs))
	}
	t.store.used = true
	t.mu.core.Appended(t.shared.now(), queue.Offset(first), &s.fx, msgs...)
	return first + commitlog.Offset(len(msgs)), nil
}

// StoreEach accepts messages one by one, in order, as Publish does, by one write of all.
// It appends to errs what became of each: nil, or an error of Publish. Requires: Durable.
func (t *Topic) StoreEach(wall mono.Wall, batch []Published, errs []error) []error {
	t.storing.Lock()
	defer t.storing.Unlock()
	s := t.shared.steps.Get().(*step)
	for i := range batch {
		s.msgs = append(s.msgs, t.shared.message(wall, &batch[i]))
	}
	of := errs[len(errs):]
	admitted := s.msgs[:0]
	t.mu.Lock()
	t.mu.core.SetTight(t.tight(0))
	for i, m := range s.msgs {
		err := t.takes(1)
		if err == nil {
			first := m
			if len(admitted) > 0 {
				first = admitted[0]
			}
			err = t.mu.core.Admit(t.shared.now(), len(admitted), 1, first.Arrival, m.Arrival)
		}
		if err == nil {
			err = t.mu.pacing.police(batch[i].From, 1, m.Arrival)
		}
		if of = append(of, err); err == nil {
			admitted = append(admitted, m)
		} else { // it is still ours
			s.fx.Free = append(s.fx.Free, m)
		}
	}
	var at commitlog.Offset
	var err error
	if len(admitted) > 0 {
		at, err = t.writeThrough(s, admitted)
		at -= commitlog.Offset(len(admitted))
	}
	for i := range batch {
		p := &batch[i]
		switch {
		case of[i] != nil:
			continue
		case err != nil:
			of[i] = err
			continue
		}
		if at++; p.Stored != nil {
			*p.Stored = Stored{at}
		}
		t.metrics.arrived(p.Arrival.Source, 1)
		t.counted(p.From, 1, p.Arrival.At)
	}
	for i := range batch {
		if of[i] == nil {
			t.mu.pacing.tell(batch[i].From, len(admitted), t.shared.now())
		}
	}
	t.end(s)
	return append(errs, of...)
}

// Durable reports whether what is published has to be followed by Sync before
// it may be called accepted.
func (t *Topic) Durable() bool { return t.through && t.shared.cfg.Storage.cfg.Fsync }

// Stored is where messages are in the topic's log.
type Stored struct{ end commitlog.Offset }

// Sync returns when messages that were published before are on stable storage.
// Many callers share one fsync. Errors: ErrStorage, after which that is not known, and
// which says nothing of what others publish; ErrDraining, likewise.
func (t *Topic) Sync(upTo Stored) error {
	if !t.Durable() {
		return nil
	}
	if log := t.store.log.Load(); log != nil {
		err := log.Sync(upTo.end)
		switch {
		case err == nil:
		case !errors.Is(err, commitlog.ErrClosed):
			t.store.noted(publishing, err)
			return fmt.Errorf("%w: %w", ErrStorage, err)
		case t.shared.draining.Load():
			return ErrDraining
		} // else the topic was deleted, with what it had accepted
	}
	return nil
}
