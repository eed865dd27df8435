package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
)

// Journal stores events (loaddistributor/store). Calls do not overlap.
type Journal interface {
	// Append makes events durable, in order. base is the version before the first event.
	// After ErrStoreFull none of the events is durable, and the journal stays usable.
	// After another error the caller appends no more.
	Append(ctx context.Context, base uint64, events []catalog.Event) error
	// Compact replaces all events up to the dump's version by the dump.
	Compact(ctx context.Context, dump catalog.Dump) error
	// Lost is closed when this process loses the leadership.
	Lost() <-chan struct{}
}

// compactAfter is the minimum weight of events between two dumps. If the last dump weighs
// more, its weight is the minimum, so that dumps at most double the written data.
const compactAfter = 10_000

// dumpAgain is the weight of events after which a failed dump is tried again.
const dumpAgain = 1000

// weight returns the weight of an event that names a topic's publishers: 1, plus 1 for
// each 30 publishers, about 2.4 KB. An event stored as a difference names few publishers.
// Its weight is 1, plus 1 for each 1,000 publishers of the topic, for the cost of
// reading.
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

// maxBatch limits the events of one Append. Waiting events are appended together, to
// share the cost of durability.
const maxBatch = 1000

// An event takes two steps. First it is staged: next, the catalog for decisions,
// accepts or refuses it, and later decisions build on it. Then the committer appends
// staged events to the journal and applies them to committed, the catalog that readers see.
// committed cannot refuse an event, because next accepted the same sequence. So no state
// that a crash could undo is visible outside: in answers, in assignments, or in messages
// to brokers.
//
// The design that lost had a single catalog and delayed its effects: every reader would
// have had to know how much of the catalog it may use.

// pipeline holds the two catalogs and the staged events.
type pipeline struct {
	mu   *sync.RWMutex // set once; the controller's lock, which guards the rest
	wake chan struct{} // set once; 1 deep: an event is staged

	committed *catalog.Catalog // durable: for readers
	next      *catalog.Catalog // for decisions: committed plus the staged events
	staged    []staged         // waiting for the committer, oldest first
	halted    error            // why no event can be staged; nil: staging works
}

type staged struct {
	event catalog.Event
	ticket
}

// ticket lets the caller of stage wait for the result.
type ticket struct {
	done chan error // receives the one result
}

// wait returns nil when the event is durable and committed, or an error if this process will
// never know.
func (t ticket) wait() error { return <-t.done }

// stage applies an event to next. The error is the catalog's refusal, or
// ErrNotCommitted.
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
	default: // a wake-up is already pending
	}
	return t, nil
}

// Work per acquisition of the lock: judgeAtOnce busy topics, or quietPerBusy times more
// quiet topics.
const (
	judgeAtOnce   = 100
	quietPerBusy  = 20
	workOfOneTurn = judgeAtOnce * quietPerBusy
)

// inTurns calls f with the name of every topic, sorted. It acquires the lock for
// workOfOneTurn of f's work at a time, so topics may be added or removed between turns.
// Requires: the lock is not held.
func (p *pipeline) inTurns(lock sync.Locker, f func(name string) (work int)) {
	for after, more := "", true; more; {
		more = false
		lock.Lock()
		work := 0
		for name := range p.committed.Names(after) {
			if more = work >= workOfOneTurn; more {
				break
			}
			after, work = name, work+f(name)
		}
		lock.Unlock()
	}
}

// commit stages an event and waits until the event is durable and committed. Requires: the
// lock is not held.
func (p *pipeline) commit(e catalog.Event) error {
	p.mu.Lock()
	t, err := p.stage(e)
	p.mu.Unlock()
	if err != nil {
		return err
	}
	return t.wait()
}

// mustSucceed panics on a refusal that cannot happen. It returns an error only if the journal has
// ended, or has no room for an earlier event on which the refused event depends.
func mustSucceed(what string, err error) error {
	if err != nil && !errors.Is(err, ErrNotCommitted) && !errors.Is(err, ErrClosing) && !errors.Is(err, ErrStoreFull) {
		panic(fmt.Sprintf("controller: %s: %v", what, err))
	}
	return err
}

// refusable reports whether an event is refused if the store is full. Such events are
// requests of an operator or a plan. Other events record facts, and wait for room.
func refusable(e catalog.Event) bool {
	switch e.(type) {
	case catalog.TopicPlaced, catalog.TopicMoving, catalog.BrokerCalibrated, catalog.BrokerDraining,
		catalog.BrokerRemoved, catalog.BrokerRestored, catalog.TopicRestored:
		return true
	}
	return false
}

// fullPause is the pause between attempts to append to a full store. maxHeld limits the
// events that wait for room.
const (
	fullPause = 200 * time.Millisecond
	maxHeld   = 100_000
)

// changePatience is how long running changes may continue after the controller begins to
// stop. Then they no longer wait for brokers and the adaptor.
const changePatience = 3 * time.Second

// stopPatience is how long a stopping controller waits for its journal.
const stopPatience = time.Second

// committer appends staged events to the journal, and then shows them.
type committer struct {
	mu        *sync.RWMutex
	cat       *pipeline
	announcer *announcer
	journal   Journal // nil: events are not stored
	log       *slog.Logger
	undumped  prometheus.Counter
	full      bool // the journal had no room for the last batch
}

// run appends staged events until stop is closed and no event is left, or until the
// journal fails. It returns the journal's error. The end of ctx aborts appends.
func (c *committer) run(ctx context.Context, stop <-chan struct{}) error {
	sinceDump, nextDump := compactAfter, compactAfter // dump once at the start
	for {
		batch, base := c.takeBatch()
		if len(batch) == 0 {
			select {
			case <-c.cat.wake:
			case <-c.journalLost():
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
		c.publish(batch)
		if sinceDump += eventsWeight(batch); sinceDump >= nextDump {
			sinceDump = 0
			size, err := c.compact(ctx)
			nextDump = max(compactAfter, size)
			if err != nil {
				// A failed dump only costs room. If the term is over, the next event
				// shows it. A new term would have the same problem.
				c.log.Error("cannot write a dump; the store keeps all events and retries later", obs.KeyVersion, base+uint64(len(batch)), obs.KeyError, err)
				c.undumped.Inc()
				sinceDump = nextDump - dumpAgain
			}
		}
	}
}

// takeBatch returns the next batch of staged events, and the version before the batch.
func (c *committer) takeBatch() (batch []staged, base uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := min(len(c.cat.staged), maxBatch)
	batch, c.cat.staged = c.cat.staged[:n:n], c.cat.staged[n:]
	return batch, c.cat.committed.Version()
}

// finish stops staging, if no event is left.
func (c *committer) finish() (over bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if over = len(c.cat.staged) == 0; over {
		c.cat.halted = ErrClosing
	}
	return over
}

// journalLost returns the journal's Lost, or without a journal nil, which blocks for ever.
func (c *committer) journalLost() <-chan struct{} {
	if c.journal == nil {
		return nil
	}
	return c.journal.Lost()
}

// refuse handles a full store. It refuses the refusable events of the batch and of the
// staged events, and the events that depend on them. The other events stay staged. refuse
// returns when it is time to try again.
func (c *committer) refuse(batch []staged, full error, stop <-chan struct{}) error {
	if !c.full {
		c.full = true
		c.log.Error("the store has no room: changes are refused until it has", obs.KeyError, full)
	}
	c.mu.Lock()
	all := append(batch, c.cat.staged...)
	next, err := catalog.Load(c.cat.committed.Dump())
	var waiting, refused []staged
	for _, s := range all {
		if err == nil && !refusable(s.event) {
			if _, unfit := next.Apply(s.event); unfit == nil {
				waiting = append(waiting, s)
				continue
			}
		}
		refused = append(refused, s)
	}
	if err == nil {
		c.cat.next, c.cat.staged = next, waiting
	}
	c.mu.Unlock()
	if err != nil || len(waiting) > maxHeld {
		return c.halt(fmt.Errorf("%w: %d events wait for room: %w", ErrNotCommitted, len(waiting), errors.Join(full, err)), refused)
	}
	for _, s := range refused {
		s.done <- full
	}
	timer := time.NewTimer(fullPause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-c.journalLost():
		return nil // run handles the lost leadership
	case <-stop:
		if len(waiting) == 0 {
			return nil
		}
		return c.halt(fmt.Errorf("%w: %d events that the store has no room for: %w", ErrNotCommitted, len(waiting), full), nil)
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
	// Not a caller's context: durability does not depend on the waiting callers.
	return c.journal.Append(ctx, base, events)
}

// compact writes a dump and returns its weight.
func (c *committer) compact(ctx context.Context) (size int, err error) {
	if c.journal == nil {
		return 0, nil
	}
	c.mu.RLock()
	dump := c.cat.committed.Dump()
	c.mu.RUnlock()
	for _, t := range dump.Topics {
		size += weight(t.Spec) + weight(t.Ordered) + len(t.Channels)/30
	}
	return size, c.journal.Compact(ctx, dump)
}

// publish applies durable events to committed and answers the waiting callers.
func (c *committer) publish(batch []staged) {
	var changes []catalog.StateChanged
	c.mu.Lock()
	for _, s := range batch {
		changed, err := c.announcer.apply(s.event)
		if err != nil {
			panic(fmt.Sprintf("controller: a staged event is refused: %+v: %v", s.event, err))
		}
		changes = append(changes, changed...)
	}
	c.announcer.channels.tellChannels()
	c.mu.Unlock()
	logChanges(c.log, changes)
	for _, s := range batch {
		s.done <- nil
	}
}

// halt stops the pipeline. It fails the staged events: this process will never know
// whether they are durable.
func (c *committer) halt(err error, batch []staged) error {
	c.mu.Lock()
	c.cat.halted = err
	batch = append(batch, c.cat.staged...)
	c.cat.staged = nil
	c.mu.Unlock()
	for _, s := range batch {
		s.done <- err
	}
	return err
}

// announcer shows durable events and informs brokers and watchers.
type announcer struct {
	cat       *pipeline
	brokers   *brokers
	topics    *topics
	channels  *channels
	copies    *copies
	requests  *requests
	knowledge *knowledge
}

// apply applies an event to the committed catalog and informs the watchers and brokers that the
// event concerns.
func (a *announcer) apply(e catalog.Event) (changes []catalog.StateChanged, err error) {
	effects, err := a.cat.committed.Apply(e)
	if err != nil {
		return nil, err
	}
	for _, effect := range effects {
		switch effect := effect.(type) {
		case catalog.PlacementChanged:
			a.topics.wakeWatchers(effect.Topic)
			a.topics.wake(effect.Topic)
			a.copies.entrust(effect.Topic)
		case catalog.StateChanged:
			a.topics.wakeWatchers(effect.Topic)
			changes = append(changes, effect)
		case catalog.ChannelsChanged:
			if a.knowledge.leader == nil { // a follower has no broker to inform
				a.channels.noteChannels(effect)
			}
		}
	}
	if joined, ok := e.(catalog.BrokerJoined); ok {
		if s := a.brokers.sessions[joined.ID]; s != nil {
			a.requests.assign(s, time.Now())
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
