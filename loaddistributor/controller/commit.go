package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
)

// Journal keeps events (loaddistributor/store). Its calls come one at a time.
type Journal interface {
	// Append makes events durable, in their order; base is the version before
	// the first. After ErrStoreFull none of them is, and the journal goes on. After another
	// error nothing more is appended.
	Append(ctx context.Context, base uint64, events []catalog.Event) error
	// Compact puts the dump in the place of all events up to its version.
	Compact(ctx context.Context, dump catalog.Dump) error
	// Lost is closed when this process does not lead any more.
	Lost() <-chan struct{}
}

// compactAfter is what the events appended between two dumps weigh, unless the dump weighs
// more, so that dumps at most double what is written.
const compactAfter = 10_000

// dumpAgain is after what weight of events a dump that failed is tried again.
const dumpAgain = 1000

// weight is that of an event which names a topic's publishers: 1, and 1 more for each 30 of
// them, some 2.4 KB. A change that is kept as such names few; it has 1 more for each 1,000
// publishers of its topic, for what it takes to read.
func weight(spec *catalog.Spec) int { return 1 + len(spec.Demand.Publishers)/30 }

func eventsWeight(batch []staged) (sum int) {
	for _, s := range batch {
		switch e := s.event.(type) {
		case catalog.TopicPlaced:
			sum += weight(e.Spec)
		case catalog.TopicMoving:
			if e.Change() != nil {
				sum += 1 + e.Spec.Demand.Count()/1000
			} else {
				sum += weight(e.Spec)
			}
		case catalog.ChannelsCreated:
			sum += 1 + len(e.Channels)/30
		case catalog.ChannelsDeleted:
			sum += 1 + len(e.Channels)/30
		default:
			sum++
		}
	}
	return sum
}

// maxBatch bounds the events of one Append; those that wait go together, so
// that they share what makes them durable.
const maxBatch = 1000

// An event takes two steps. It is staged: the catalog of decisions, mu.next,
// takes or refuses it, and from then on decisions count on it. The committer
// appends what is staged to the journal, and then applies it to the catalog
// that is shown, mu.cat, which cannot refuse it, for it has seen the same
// events. So what a crash could undo is never seen outside: no request's
// answer, no publisher's broker, no message to a broker.
//
// The design that lost is one catalog whose effects are held back: every
// reader would have had to know how far it may look.

// pipeline is what events go through (commit.go).
type pipeline struct {
	wake   chan struct{}    // set once; 1 deep: something is staged
	cat    *catalog.Catalog // durable: what is shown
	next   *catalog.Catalog // decided: cat and what is staged
	staged []staged         // for the committer, oldest first
	halted error            // why nothing can be staged any more
}

// staged is an event on its way.
type staged struct {
	event catalog.Event
	ticket
}

// ticket is what a stager may wait for.
type ticket struct {
	done chan error // gets the one result
}

// wait returns when the event is durable and shown, or with why it never will
// be known to be.
func (t ticket) wait() error { return <-t.done }

// stage decides on an event. An error is the catalog's refusal, or ErrNotCommitted.
func (p *pipeline) stage(e catalog.Event) (ticket, error) {
	if p.halted != nil {
		return ticket{}, p.halted
	}
	if moving, ok := e.(catalog.TopicMoving); ok {
		e = p.next.Based(moving)
	}
	if _, err := p.next.Apply(e); err != nil {
		return ticket{}, err
	}
	t := ticket{done: make(chan error, 1)}
	p.staged = append(p.staged, staged{e, t})
	select {
	case p.wake <- struct{}{}:
	default: // the committer has been woken and has not looked yet
	}
	return t, nil
}

// commit stages an event and waits until it is durable and shown. Requires: the lock is not
// held.
func (st *state) commit(e catalog.Event) error {
	st.Lock()
	t, err := st.stage(e)
	st.Unlock()
	if err != nil {
		return err
	}
	return t.wait()
}

// must is for a refusal that cannot be: only the end of the journal, or a journal without
// room for what the event depends on, is an error then.
func must(what string, err error) error {
	if err != nil && !errors.Is(err, ErrNotCommitted) && !errors.Is(err, ErrClosing) && !errors.Is(err, ErrStoreFull) {
		panic(fmt.Sprintf("controller: %s: %v", what, err))
	}
	return err
}

// refusable reports whether an event that the store has no room for is refused: it is what an
// operator or a plan asked for. Other events say what has happened already, and wait for room.
func refusable(e catalog.Event) bool {
	switch e.(type) {
	case catalog.TopicPlaced, catalog.TopicMoving, catalog.BrokerCalibrated, catalog.BrokerDraining,
		catalog.BrokerRemoved, catalog.BrokerRestored, catalog.TopicRestored:
		return true
	}
	return false
}

// fullPause is between two attempts to append to a store that has no room, and maxHeld bounds
// the events that wait for room.
const (
	fullPause = 200 * time.Millisecond
	maxHeld   = 100_000
)

// changePatience is how long the changes that have begun go on in a controller that stops: a
// broker or an adaptor that does not answer by then is not waited for.
const changePatience = 3 * time.Second

// stopPatience is how long a controller that stops waits for its journal.
const stopPatience = time.Second

// committer takes what is staged to the journal, and shows it then.
type committer struct {
	mu       *state
	journal  Journal // nil: nothing is kept
	log      *slog.Logger
	undumped prometheus.Counter
	full     bool // the journal had no room for the newest batch
}

// run appends what is staged until stop is closed and nothing is left, or the journal
// fails, which is its error. Appends that are under way end with ctx.
func (c *committer) run(ctx context.Context, stop <-chan struct{}) error {
	sinceDump, enough := compactAfter, compactAfter // once at the start, whatever there was
	for {
		batch, base := c.take()
		if len(batch) == 0 {
			select {
			case <-c.mu.wake:
			case <-c.lost():
				return c.halt(fmt.Errorf("%w: the term is over, and another process may lead", ErrNotCommitted), nil)
			case <-stop:
				if c.finish() {
					return nil
				}
			}
			continue
		}
		err := c.append(ctx, base, batch)
		if errors.Is(err, ErrStoreFull) {
			if err := c.refuse(batch, err, stop); err != nil {
				return err
			}
			continue
		}
		if c.full = c.full && err != nil; err != nil {
			return c.halt(fmt.Errorf("%w: %w", ErrNotCommitted, err), batch)
		}
		c.show(batch)
		if sinceDump += eventsWeight(batch); sinceDump >= enough {
			sinceDump = 0
			size, err := c.compact(ctx)
			enough = max(compactAfter, size)
			if err != nil {
				// Nothing is lost by it but room. A term that is over shows at the next
				// event; to end this one, for the next to try the same, would not help.
				c.log.Error("the store keeps all events for now: no dump could take their place", obs.KeyVersion, base+uint64(len(batch)), obs.KeyError, err)
				c.undumped.Inc()
				sinceDump = enough - dumpAgain
			}
		}
	}
}

// take returns the next of what is staged, and the version before it.
func (c *committer) take() (batch []staged, base uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := min(len(c.mu.staged), maxBatch)
	batch, c.mu.staged = c.mu.staged[:n:n], c.mu.staged[n:]
	return batch, c.mu.cat.Version()
}

// finish has nothing staged any more, if nothing is left.
func (c *committer) finish() (over bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if over = len(c.mu.staged) == 0; over {
		c.mu.halted = ErrClosing
	}
	return over
}

// lost is nil, which blocks for ever, without a journal.
func (c *committer) lost() <-chan struct{} {
	if c.journal == nil {
		return nil
	}
	return c.journal.Lost()
}

// refuse refuses the changes of a batch that the store has no room for, and what was staged
// after them, as far as it depends on them. The rest is staged as it was, and refuse returns
// when it may be tried again.
func (c *committer) refuse(batch []staged, full error, stop <-chan struct{}) error {
	if !c.full {
		c.full = true
		c.log.Error("the store has no room: changes are refused until it has", obs.KeyError, full)
	}
	c.mu.Lock()
	all := append(batch, c.mu.staged...)
	next, err := catalog.Load(c.mu.cat.Dump())
	var held, refused []staged
	for _, s := range all {
		if err == nil && !refusable(s.event) {
			if _, unfit := next.Apply(s.event); unfit == nil {
				held = append(held, s)
				continue
			}
		}
		refused = append(refused, s)
	}
	if err == nil {
		c.mu.next, c.mu.staged = next, held
	}
	c.mu.Unlock()
	if err != nil || len(held) > maxHeld {
		return c.halt(fmt.Errorf("%w: %d events wait for room: %w", ErrNotCommitted, len(held), errors.Join(full, err)), refused)
	}
	for _, s := range refused {
		s.done <- full
	}
	timer := time.NewTimer(fullPause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-c.lost():
		return nil // run sees it
	case <-stop:
		if len(held) == 0 {
			return nil
		}
		return c.halt(fmt.Errorf("%w: %d events that the store has no room for: %w", ErrNotCommitted, len(held), full), nil)
	}
}

func (c *committer) append(ctx context.Context, base uint64, batch []staged) error {
	if c.journal == nil {
		return nil
	}
	events := make([]catalog.Event, len(batch))
	for i, s := range batch {
		events[i] = s.event
	}
	// Not a caller's context: whether it is durable does not depend on who waits.
	return c.journal.Append(ctx, base, events)
}

// compact returns what the dump weighs.
func (c *committer) compact(ctx context.Context) (size int, err error) {
	if c.journal == nil {
		return 0, nil
	}
	c.mu.RLock()
	dump := c.mu.cat.Dump()
	c.mu.RUnlock()
	for _, t := range dump.Topics {
		size += weight(t.Spec) + weight(t.Ordered) + len(t.Channels)/30
	}
	return size, c.journal.Compact(ctx, dump)
}

// show applies durable events to what is shown, and answers those who wait.
func (c *committer) show(batch []staged) {
	var changes []catalog.StateChanged
	c.mu.Lock()
	for _, s := range batch {
		changed, err := c.mu.apply(s.event)
		if err != nil {
			panic(fmt.Sprintf("controller: a staged event is refused: %+v: %v", s.event, err))
		}
		changes = append(changes, changed...)
	}
	c.mu.tellChannels()
	c.mu.Unlock()
	logChanges(c.log, changes)
	for _, s := range batch {
		s.done <- nil
	}
}

// halt ends the pipeline: what is staged is not known to be durable, and never
// will be in this process.
func (c *committer) halt(err error, batch []staged) error {
	c.mu.Lock()
	c.mu.halted = err
	batch = append(batch, c.mu.staged...)
	c.mu.staged = nil
	c.mu.Unlock()
	for _, s := range batch {
		s.done <- err
	}
	return err
}

// apply makes an event visible.
func (st *state) apply(e catalog.Event) (changes []catalog.StateChanged, err error) {
	effects, err := st.cat.Apply(e)
	if err != nil {
		return nil, err
	}
	for _, effect := range effects {
		switch effect := effect.(type) {
		case catalog.PlacementChanged:
			st.wakeWatchers(effect.Topic)
			st.wakeTopic(effect.Topic)
			st.entrust(effect.Topic)
		case catalog.StateChanged:
			st.wakeWatchers(effect.Topic)
			changes = append(changes, effect)
		case catalog.ChannelsChanged:
			if st.leader == nil { // a follower has no broker to tell
				st.noteChannels(effect)
			}
		}
	}
	if joined, ok := e.(catalog.BrokerJoined); ok {
		if s := st.sessions[joined.ID]; s != nil {
			st.assign(s, time.Now())
		}
	}
	return changes, nil
}

func logChanges(log *slog.Logger, changes []catalog.StateChanged) {
	for _, s := range changes {
		level := slog.LevelInfo
		if s.To == catalog.Degraded {
			level = slog.LevelWarn
		}
		log.Log(context.Background(), level, "topic", obs.KeyTopic, s.Topic,
			obs.KeyState, s.To.String(), "from", s.From.String(), obs.KeyReason, s.Reason)
	}
}
