package broker

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/queue"
)

// intake accepts publications to a topic.
type intake struct {
	// Set once.
	runner *runner
	store  *store // nil if the topic has no disk
	most   int    // maximum number of messages per batch

	// Guarded by mu.
	recorder   recorder
	pacing     pacing
	publishers int // open connections that have published here
}

// Published is a message from a publisher.
type Published struct {
	Body []byte // copied
	// Attribute travels with the message and means nothing to the broker. At most
	// wire.MaxAttribute bytes, copied. Only an Encoder receives the attribute.
	Attribute []byte
	Arrival   stamp.Arrival
	Defer     time.Duration
	// From is the publisher, registered with this topic; may be nil.
	From *Publisher
	// Stored receives the position for Sync; may be nil.
	Stored   *Stored
	admitted bool // police has admitted the message
	// Prefixed means that Body, or each body of a batch, begins with its attribute, as
	// wire.CutAttribute expects. Requires: the caller has checked the bodies.
	Prefixed bool
	// NoWait: the call returns ErrBusy if it would wait for the disk. The caller may repeat
	// the call without NoWait.
	NoWait bool
}

// Publish is intake.Publish.
func (t *Topic) Publish(now mono.Time, wall mono.Wall, p Published) error {
	return t.intake.Publish(now, wall, p)
}

// Publish accepts one message.
// Errors: queue.ErrFull, *queue.OverLimitError, ErrGone, ErrRetired, ErrDraining, ErrBusy.
func (in *intake) Publish(now mono.Time, wall mono.Wall, p Published) error {
	s := in.runner.shared.steps.Get().(*step)
	s.msgs = append(s.msgs, in.runner.shared.message(wall, &p))
	return in.put(now, s, p)
}

// Bodies is a sequence of message bodies, such as an MPUB.
type Bodies interface {
	Len() int
	Bytes() int // total bytes of the bodies
	Each(func(body []byte))
}

// A batch above largeBatch messages or largeBytes bytes is large. A call with NoWait does
// not process a large batch. Other calls yield the processor and the topic after every
// batchSlice messages.
const (
	largeBatch = 512
	largeBytes = 256 << 10
	batchSlice = 256
)

// PublishBatch is intake.PublishBatch.
func (t *Topic) PublishBatch(now mono.Time, wall mono.Wall, p Published, bodies Bodies) error {
	return t.intake.PublishBatch(now, wall, p, bodies)
}

// PublishBatch accepts all messages or none. The messages share the properties of p, which
// has no body. Errors: as Publish.
func (in *intake) PublishBatch(now mono.Time, wall mono.Wall, p Published, bodies Bodies) error {
	// A batch may have a million messages of one byte; the copies would take a hundred
	// times the memory.
	if n := bodies.Len(); n > in.most {
		s := in.runner.begin()
		defer in.runner.end(s)
		if err := in.runner.acceptsPublishes(); err != nil {
			return err
		}
		return in.runner.mu.core.Backlog().Refuse(queue.ErrFull, n)
	}
	if bodies.Len() > largeBatch || bodies.Bytes() > largeBytes {
		return in.publishLarge(now, wall, p, bodies)
	}
	return in.publishBatch(now, wall, p, bodies)
}

func (in *intake) publishBatch(now mono.Time, wall mono.Wall, p Published, bodies Bodies) error {
	s := in.runner.shared.steps.Get().(*step)
	s.batch.like, s.batch.wall = p, wall
	bodies.Each(s.batch.gather)
	s.batch.like = Published{}
	return in.put(now, s, p)
}

// publishLarge creates messages only after it has checked for room. A batch is stored as a
// whole if there is no disk or if one write stores the batch. Such a batch counts as held
// from the check on. Otherwise the first slice is accepted or refused on behalf of the
// whole batch. Each further slice waits until the disk has taken the previous slices. Only
// a deletion of the topic can interrupt the batch, since Close waits.
func (in *intake) publishLarge(now mono.Time, wall mono.Wall, p Published, bodies Bodies) (err error) {
	if p.NoWait {
		return ErrBusy
	}
	n, bytes := bodies.Len(), bodies.Bytes()+bodies.Len()*(len(p.Attribute)+queue.Overhead)
	whole := in.runner.writeThrough || in.most < math.MaxInt
	s := in.runner.begin()
	err, p.admitted = in.admit(in.runner.instant(now), 0, n, p.Arrival.At, &p), true
	if err == nil && whole {
		if in.runner.mu.core.Tick(in.runner.instant(now), &s.fx); in.runner.tight(bytes) || !in.runner.writeThrough && !in.runner.mu.core.Backlog().Room(n) {
			err = in.runner.mu.core.Backlog().Refuse(queue.ErrFull, n)
		}
	}
	in.runner.end(s)
	if err != nil {
		return err
	}
	if whole {
		in.runner.shared.large <- struct{}{}
		defer func() { <-in.runner.shared.large }()
		if in.runner.writeThrough {
			in.runner.shared.held.Add(int64(bytes))
			defer in.runner.shared.held.Add(-int64(bytes))
		}
		return in.publishBatch(now, wall, p, bodies)
	}
	in.runner.shared.batches.RLock()
	defer in.runner.shared.batches.RUnlock()
	s = in.runner.shared.steps.Get().(*step)
	later := false
	put := func() {
		<-in.runner.shared.large
		err = in.accept(now, s, p, later)
		s, later = in.runner.shared.steps.Get().(*step), true
	}
	bodies.Each(func(body []byte) {
		if err != nil {
			return
		}
		if len(s.msgs) == 0 {
			in.runner.shared.large <- struct{}{}
		}
		p.Body = body
		if s.msgs = append(s.msgs, in.runner.shared.message(wall, &p)); len(s.msgs) == batchSlice {
			put()
		}
	})
	if len(s.msgs) > 0 {
		put()
	}
	in.runner.discard(s)
	return err
}

// put accepts all messages of the step or none, and ends the step.
func (in *intake) put(now mono.Time, s *step, p Published) error {
	switch {
	case !in.runner.writeThrough:
		return in.accept(now, s, p, false)
	case !p.NoWait:
		return in.publishThrough(s, p)
	}
	for _, m := range s.msgs {
		in.runner.shared.pool.put(m)
	}
	in.runner.discard(s)
	return ErrBusy
}

// acceptsMessages is acceptsPublishes for n messages. It also refuses messages if the log is full.
// Requires: mu held.
func (in *intake) acceptsMessages(n int) error {
	err := in.runner.acceptsPublishes()
	if err == nil && in.store.full() {
		err = in.runner.mu.core.Backlog().Refuse(queue.ErrFull, n)
	}
	return err
}

// admit is takes, plus the checks of the contract and of police for n messages of p. ahead
// messages are admitted but not appended yet: see queue.Topic.Admit. Requires: mu held.
func (in *intake) admit(now mono.Time, ahead, n int, first mono.Time, p *Published) error {
	err := in.acceptsMessages(n)
	if err == nil {
		err = in.runner.mu.core.Admit(now, ahead, n, first, p.Arrival.At)
	}
	if err == nil && !p.admitted {
		err = in.pacing.police(p.From, n, p.Arrival.At)
	}
	return err
}

// accept appends the step's messages to the topic's backlog in memory, and ends the step.
// With later the first part of the batch was accepted; then the messages are accepted unless
// the topic is gone.
func (in *intake) accept(now mono.Time, s *step, p Published, later bool) (err error) {
	bytes := 0
	for _, m := range s.msgs {
		bytes += m.Size()
	}
	open := func() error {
		if later && !in.runner.mu.closed {
			return nil
		}
		return in.runner.acceptsPublishes()
	}
	full := !later && in.store.full()
	room := func() bool {
		in.runner.mu.core.Log().SetTight(in.runner.tight(bytes))
		return in.runner.mu.core.Backlog().Room(len(s.msgs))
	}
	in.runner.mu.Lock()
	// With a disk, a full backlog is being written: the publisher waits for the write,
	// unless writing fails.
	for !full && open() == nil && !room() && in.store.spilling() {
		if p.NoWait {
			err = ErrBusy
			break
		}
		in.runner.room.Wait()
	}
	if err == nil {
		err = open()
	}
	if err == nil && !full && !p.admitted {
		err = in.pacing.police(p.From, len(s.msgs), p.Arrival.At)
	}
	switch now = in.runner.instant(now); {
	case err != nil:
	case full:
		err = in.runner.mu.core.Backlog().Refuse(queue.ErrFull, len(s.msgs))
	case later:
		in.runner.mu.core.Enter(now, &s.fx, s.msgs...)
	default:
		err = in.runner.mu.core.Put(now, &s.fx, s.msgs...)
	}
	if err == nil {
		in.count(&p, len(s.msgs))
		in.pacing.advise(p.From, len(s.msgs), now)
	} else { // the messages are still owned here
		s.fx.Free = append(s.fx.Free, s.msgs...)
	}
	in.runner.end(s)
	return err
}

// PublishEach is intake.PublishEach.
func (t *Topic) PublishEach(now mono.Time, wall mono.Wall, batch []Published, errs []error) []error {
	return t.intake.PublishEach(now, wall, batch, errs)
}

// PublishEach accepts messages one by one, in order, while holding the lock once. It
// appends the result of each message to errs: nil, or an error of Publish. It stops after
// ErrBusy, ErrGone or ErrRetired. It returns ErrBusy where Publish would wait, and always
// if the topic stores messages before accepting them.
func (in *intake) PublishEach(now mono.Time, wall mono.Wall, batch []Published, errs []error) []error {
	if in.runner.writeThrough {
		return append(errs, ErrBusy)
	}
	s := in.runner.shared.steps.Get().(*step)
	bytes := 0
	for i := range batch {
		m := in.runner.shared.message(wall, &batch[i])
		s.msgs = append(s.msgs, m)
		bytes += m.Size()
	}
	first := len(errs)
	in.runner.mu.Lock()
	now = in.runner.instant(now)
	short := in.runner.tight(bytes) // memory may be too short for the whole batch; then each message is checked
	in.runner.mu.core.Log().SetTight(short)
	if in.runner.acceptsPublishes() == nil && !in.store.full() && !in.runner.mu.core.Contract().Rejects() && in.runner.mu.core.Backlog().Free() >= len(s.msgs) && !in.pacing.policing() { // one step for all is cheaper
		in.runner.mu.core.Enter(now, &s.fx, s.msgs...)
		errs = append(errs, make([]error, len(s.msgs))...)
	} else {
		for i, m := range s.msgs {
			err := in.acceptsMessages(1)
			if short {
				in.runner.mu.core.Log().SetTight(in.runner.tight(s.fx.Held + m.Size()))
			}
			// The store learns of an overflow only at the end of the step.
			if err == nil && !in.runner.mu.core.Backlog().Room(1) && (in.store.spilling() || s.fx.Disk) {
				err = ErrBusy
			}
			if err == nil {
				err = in.pacing.police(batch[i].From, 1, batch[i].Arrival.At)
			}
			if err == nil {
				err = in.runner.mu.core.Put(now, &s.fx, m)
			}
			errs = append(errs, err)
			if err != nil {
				s.fx.Free = append(s.fx.Free, m)
			}
			if err == ErrBusy || err == ErrGone || err == ErrRetired {
				s.fx.Free = append(s.fx.Free, s.msgs[i+1:]...)
				break
			}
		}
	}
	for i, n := 0, 1; first+i < len(errs); i, n = i+n, 1 {
		if errs[first+i] != nil {
			continue
		}
		p := &batch[i]
		for first+i+n < len(errs) && errs[first+i+n] == nil && batch[i+n].From == p.From && batch[i+n].Arrival == p.Arrival {
			n++ // messages of one segment
		}
		in.count(p, n)
	}
	if len(batch) > 0 {
		in.pacing.advise(batch[0].From, len(batch), now)
	}
	in.runner.end(s)
	return errs
}

// count records the acceptance of n messages like p. Requires: mu held.
func (in *intake) count(p *Published, n int) {
	in.runner.metrics.recordArrived(p.Arrival.Source, n)
	if c := in.recorder.capture; c != nil {
		c.add(p.From, p.Arrival.At, n)
	}
	in.pacing.count(p.From, n, p.Arrival.At)
}

func (b *shared) message(wall mono.Wall, p *Published) *queue.Message {
	attribute, body := p.Attribute, p.Body
	if p.Prefixed {
		attribute, body, _ = wire.CutAttribute(p.Body)
	}
	m := b.pool.get(len(body) + len(attribute))
	m.ID = b.newID()
	m.SetContent(body, attribute)
	m.Timestamp = wall
	m.Arrival, m.Source = p.Arrival.At, p.Arrival.Source
	m.Defer = p.Defer
	m.Only, m.Attempts, m.Offset = nil, 0, 0 // the log sets the offset when the message is appended
	return m
}

// batch creates messages from the bodies of one PublishBatch.
type batch struct {
	gather func(body []byte) // created once, since a closure allocates
	like   Published
	wall   mono.Wall
}

// ErrStorage: the message could not be stored; a retry may succeed.
var ErrStorage = errors.New("storage failed")

// publishThrough appends the step's messages to the topic's log. Then they are accepted,
// and durable after Sync. publishThrough ends the step.
func (in *intake) publishThrough(s *step, p Published) error {
	in.runner.storing.Lock()
	defer in.runner.storing.Unlock()
	n := len(s.msgs)
	in.runner.mu.Lock()
	in.runner.mu.core.Log().SetTight(in.runner.tight(0))
	err := in.admit(in.runner.shared.now(), 0, n, p.Arrival.At, &p)
	if err != nil { // the messages are still owned here
		s.fx.Free = append(s.fx.Free, s.msgs...)
	} else {
		var end commitlog.Offset
		if end, err = in.writeThrough(s, s.msgs); p.Stored != nil {
			*p.Stored = Stored{end}
		}
		if err == nil {
			in.count(&p, n)
			in.pacing.advise(p.From, n, in.runner.shared.now())
		}
	}
	in.runner.end(s)
	return err
}

// writeThrough appends messages to the topic's log with one write, which accepts them. It
// returns the end offset of the messages. After an error the messages are given back.
// Errors: ErrStorage. Requires: storing and mu held; mu is released during the write.
func (in *intake) writeThrough(s *step, msgs []*queue.Message) (end commitlog.Offset, err error) {
	storage := in.runner.shared.cfg.Storage
	records := storage.records.Get().(*[]commitlog.Record)
	e := storage.current()
	for _, m := range msgs {
		*records = append(*records, e.record(m, false))
	}
	in.runner.mu.Unlock()
	first, err := in.store.append(e, *records)
	storage.putRecords(records)
	in.runner.mu.Lock()
	in.runner.mu.core.Log().SetTight(in.runner.tight(0))
	if err != nil {
		s.fx.Free = append(s.fx.Free, msgs...)
		return 0, in.runner.mu.core.Backlog().Refuse(fmt.Errorf("%w: %w", ErrStorage, err), len(msgs))
	}
	in.runner.disk.used = true
	in.runner.mu.core.Disk().Appended(in.runner.shared.now(), queue.Offset(first), &s.fx, msgs...)
	return first + commitlog.Offset(len(msgs)), nil
}

// StoreEach is intake.StoreEach.
func (t *Topic) StoreEach(wall mono.Wall, batch []Published, errs []error) []error {
	return t.intake.StoreEach(wall, batch, errs)
}

// StoreEach accepts messages one by one, in order, like Publish, with a single write. It
// appends the result of each message to errs: nil, or an error of Publish. Requires:
// Durable.
func (in *intake) StoreEach(wall mono.Wall, batch []Published, errs []error) []error {
	in.runner.storing.Lock()
	defer in.runner.storing.Unlock()
	s := in.runner.shared.steps.Get().(*step)
	for i := range batch {
		s.msgs = append(s.msgs, in.runner.shared.message(wall, &batch[i]))
	}
	results := errs[len(errs):]
	admitted := s.msgs[:0]
	in.runner.mu.Lock()
	in.runner.mu.core.Log().SetTight(in.runner.tight(0))
	for i, m := range s.msgs {
		first := m
		if len(admitted) > 0 {
			first = admitted[0]
		}
		err := in.admit(in.runner.shared.now(), len(admitted), 1, first.Arrival, &batch[i])
		if results = append(results, err); err == nil {
			admitted = append(admitted, m)
		} else { // the message is still owned here
			s.fx.Free = append(s.fx.Free, m)
		}
	}
	var offset commitlog.Offset
	var err error
	if len(admitted) > 0 {
		offset, err = in.writeThrough(s, admitted)
		offset -= commitlog.Offset(len(admitted))
	}
	for i := range batch {
		p := &batch[i]
		switch {
		case results[i] != nil:
			continue
		case err != nil:
			results[i] = err
			continue
		}
		if offset++; p.Stored != nil {
			*p.Stored = Stored{offset}
		}
		in.count(p, 1)
	}
	for i := range batch {
		if results[i] == nil {
			in.pacing.advise(batch[i].From, len(admitted), in.runner.shared.now())
		}
	}
	in.runner.end(s)
	return append(errs, results...)
}

// Durable is intake.Durable.
func (t *Topic) Durable() bool { return t.intake.Durable() }

// Durable reports whether messages count as accepted only after Sync.
func (in *intake) Durable() bool {
	return in.runner.writeThrough && in.runner.shared.cfg.Storage.cfg.Fsync
}

// Stored is a position in the topic's log.
type Stored struct{ end commitlog.Offset }

// Sync is intake.Sync.
func (t *Topic) Sync(upTo Stored) error { return t.intake.Sync(upTo) }

// Sync returns after previously published messages are on stable storage. Many callers
// share one fsync. After ErrStorage or ErrDraining the state of these messages is unknown;
// other publishers' messages are not affected.
func (in *intake) Sync(upTo Stored) error {
	if !in.Durable() {
		return nil
	}
	if log := in.store.log.Load(); log != nil {
		err := log.Sync(upTo.end)
		switch {
		case err == nil:
		case !errors.Is(err, commitlog.ErrClosed):
			in.store.recordResult(publishing, err)
			return fmt.Errorf("%w: %w", ErrStorage, err)
		case in.runner.shared.draining.Load():
			return ErrDraining
		} // otherwise the topic was deleted with its messages
	}
	return nil
}
