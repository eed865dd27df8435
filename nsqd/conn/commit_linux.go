package conn

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/poll"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsqd/broker"
)

// commit carries out what connections published to a topic whose messages have to be on
// stable storage before they are answered, each once and with nothing after it. What comes
// while the disk is at it waits, and shares the next write and the next fsync.
type commit struct {
	topic *broker.Topic
	mu    struct {
		sync.Mutex
		waiting []*slot
		running bool
	}
	// Owned by carryOut, which keeps them from one time to the next.
	slots, stored []*slot
	pubs          []broker.Published
	errs          []error
}

// What is stored by one write, at most; the last message may be more.
const (
	commitSize  = 256
	commitBytes = 1 << 20
)

// commits are those of a loop. Owned by its goroutine.
type commits struct {
	all       []*commit // that have something to do
	spare     *commit   // for the next one; nil: none
	committer committer
}

// join has the held operation carried out with others to the same topic, if it can
// be: it waits for the disk and nothing else.
func (cs *commits) join(s *slot) bool {
	op := &s.held.op
	if !op.Kind.Publishes() || s.env.cfg.Auth != nil || s.r+s.held.n < s.w || s.pubs.batch != nil || len(s.pubs.unsettled) > 0 {
		return false
	}
	to := s.target(op.Topic)
	if to == nil || !to.topic.Durable() {
		return false
	}
	i := slices.IndexFunc(cs.all, func(c *commit) bool { return c.topic == to.topic })
	if i < 0 {
		i = len(cs.all)
		c := cs.spare
		if cs.spare = nil; c == nil {
			c = new(commit)
		}
		c.topic = to.topic
		cs.all = append(cs.all, c)
	}
	c := cs.all[i]
	c.mu.Lock()
	c.mu.waiting = append(c.mu.waiting, s)
	c.mu.Unlock()
	return true
}

// start starts those that have something to do, and forgets those that have not.
func (cs *commits) start(offloaded *sync.WaitGroup) {
	cs.all = slices.DeleteFunc(cs.all, func(c *commit) bool {
		c.mu.Lock()
		running := c.mu.running
		start := !running && len(c.mu.waiting) > 0
		c.mu.running = running || start
		c.mu.Unlock()
		if start && !cs.committer.take(offloaded, c) {
			offloaded.Go(func() {
				for c.carryOut() {
				}
			})
		}
		idle := !running && !start
		if idle {
			c.topic, cs.spare = nil, c
		}
		return idle
	})
}

// committer carries out commits, of one topic at a time; those of others have a goroutine
// each meanwhile. It blocks its thread as its loop does (rawfd.Blocking), and both wake each
// other by the kernel: where each fsync is a goroutine's, the scheduler wakes threads for
// it, and the runtime's monitor takes from it what it blocks, which is half of the processor
// time that a message takes where one comes at a time.
//
// The zero value is ready. It has its goroutine from the first commit on, until stop.
type committer struct {
	poller *poll.Poller // nil: not running. Written by the loop
	busy   atomic.Pointer[commit]
	ends   atomic.Bool
}

// take has it carry c out, or reports false. For the loop.
func (k *committer) take(offloaded *sync.WaitGroup, c *commit) bool {
	if k.poller == nil {
		p, err := poll.New()
		if err != nil {
			return false
		}
		k.poller = p
		offloaded.Go(k.run)
	}
	if !k.busy.CompareAndSwap(nil, c) {
		return false
	}
	k.poller.Wake()
	return true
}

// stop ends it when it has carried out what it has. For the loop, which calls close when
// all that was offloaded has ended.
func (k *committer) stop() {
	if k.poller != nil {
		k.ends.Store(true)
		k.poller.Wake()
	}
}

func (k *committer) close() {
	if k.poller != nil {
		k.poller.Close()
	}
}

func (k *committer) run() {
	for {
		if c := k.busy.Load(); c != nil {
			for c.carryOut() {
				k.poller.Blocks()
			}
			k.busy.Store(nil)
			continue // what came meanwhile may have had its wake-up with that for c
		}
		if k.ends.Load() {
			return
		}
		k.poller.Wait(true)
	}
}

// carryOut stores for those that wait, and tells their loops. It reports false when none did:
// then the commit is its loop's again.
func (c *commit) carryOut() bool {
	c.mu.Lock()
	c.slots, c.mu.waiting = c.mu.waiting, c.slots[:0]
	some := len(c.slots) > 0
	c.mu.running = some
	c.mu.Unlock()
	if !some { // it may be carried out by another already
		return false
	}
	c.store()
	for _, s := range c.slots { // the fsync of the first is that of all
		s.settle()
		if !errors.Is(s.err, errWaits) {
			s.held = task{}
		}
	}
	for _, s := range c.slots { // together, or the loop would be woken for the first
		s.back.Store(true)
		s.post() // to its loop: what is back may be given to another at once
	}
	clear(c.slots)
	return true
}

// store publishes for all slots.
func (c *commit) store() {
	now, bytes := clock.Mono(), 0
	for _, s := range c.slots {
		op, to := &s.held.op, s.target(s.held.op.Topic)
		if op.Kind == session.OpMpub || to == nil || to.topic != c.topic { // or it was deleted
			s.pubs.committing = true
			s.err = s.carryOut(&s.held, now)
			s.pubs.committing = false
			continue
		}
		s.flushFins(now)
		c.stored = append(c.stored, s)
		c.pubs = append(c.pubs, broker.Published{Body: op.Body, Arrival: s.client.arrival(&s.held), Defer: op.Defer, From: to.as, Stored: &s.pubs.stored})
		if bytes += len(op.Body); bytes >= commitBytes || len(c.pubs) == commitSize {
			c.storeBatch(now)
			bytes = 0
		}
	}
	c.storeBatch(now)
}

func (c *commit) storeBatch(now mono.Time) {
	if len(c.pubs) == 0 {
		return
	}
	c.errs = c.topic.StoreEach(clock.Wall(), c.pubs, c.errs[:0])
	for i, s := range c.stored {
		switch err := c.errs[i]; {
		case errors.Is(err, broker.ErrGone), errors.Is(err, broker.ErrRetired):
			// Alone it goes to the topic's next life, or to another broker.
			s.leaveTopic(c.topic)
			s.err = errWaits
			continue
		case err != nil:
			s.published(&s.held.op, c.topic, refusal(s.held.op.Topic, err))
		default:
			add(&s.target(s.held.op.Topic).count.count, 1)
			s.published(&s.held.op, c.topic, nil)
		}
		s.err = nil
		s.r += s.held.n
	}
	clear(c.pubs)
	clear(c.stored)
	clear(c.errs)
	c.pubs, c.stored = c.pubs[:0], c.stored[:0]
}
