package conn

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/rawfd"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/mqtt"
)

// commit stores the publishes of several connections to one durable topic. Each connection
// contributes a single command, with no command read after it. Publishes that come during an fsync
// wait, and share the next write and the next fsync.
type commit struct {
	topic *broker.Topic
	mu    struct {
		sync.Mutex
		waiting []*slot
		running bool
	}
	// Owned by carryOut, which reuses them.
	slots, stored []*slot
	pubs          []broker.Published
	errs          []error
}

// Limits of one write. Its last message may exceed commitBytes.
const (
	commitSize  = 256
	commitBytes = 1 << 20
)

// commits are a loop's commits. Owned by the loop's goroutine.
type commits struct {
	all       []*commit // with work
	spare     *commit   // for reuse; nil: none
	committer committer
}

// join adds the held operation to the commit of its topic. It returns false unless the operation
// only waits for the disk.
func (cs *commits) join(s *slot) bool {
	op := &s.heldTask.op
	if !op.Kind.Publishes() || s.client.env.cfg.Auth != nil || s.client.r+s.heldTask.n < s.client.w || s.client.pubs.batch != nil || s.client.pubs.alone || len(s.client.pubs.unsettled) > 0 {
		return false
	}
	target := s.client.pubs.target(op.Topic, publisherOf(op))
	if target == nil || !target.topic.Durable() {
		return false
	}
	i := slices.IndexFunc(cs.all, func(c *commit) bool { return c.topic == target.topic })
	if i < 0 {
		i = len(cs.all)
		c := cs.spare
		if cs.spare = nil; c == nil {
			c = new(commit)
		}
		c.topic = target.topic
		cs.all = append(cs.all, c)
	}
	c := cs.all[i]
	c.mu.Lock()
	c.mu.waiting = append(c.mu.waiting, s)
	c.mu.Unlock()
	return true
}

// start starts the commits with waiting connections, and removes the idle commits.
func (cs *commits) start(offloaded *sync.WaitGroup) {
	cs.all = slices.DeleteFunc(cs.all, func(c *commit) bool {
		c.mu.Lock()
		running := c.mu.running
		start := !running && len(c.mu.waiting) > 0
		c.mu.running = running || start
		c.mu.Unlock()
		if start && !cs.committer.tryStart(offloaded, c) {
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

// committer carries out commits, one at a time. While it is busy, each further commit has a
// goroutine of its own. The committer blocks its thread as its loop does (rawfd.Blocking), and the
// two wake each other through the kernel. With a goroutine for each fsync, the scheduler would wake
// threads, and the runtime's monitor would retake the blocked processor. Both cost half of the
// processor time of a message when messages come singly.
//
// The zero value is ready. The committer's goroutine runs from the first commit until stop.
type committer struct {
	poller *rawfd.Poller // nil: not running. Written by the loop
	busy   atomic.Pointer[commit]
	ends   atomic.Bool
}

// tryStart makes the committer carry out c, or returns false if it is busy. Called by the loop.
func (k *committer) tryStart(offloaded *sync.WaitGroup, c *commit) bool {
	if k.poller == nil {
		p, err := rawfd.NewPoller()
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

// stop ends the committer after its current commit. Called by the loop, which calls close once all
// offloaded work has ended.
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
			continue // a new commit's wake-up may have merged with c's
		}
		if k.ends.Load() {
			return
		}
		k.poller.Wait(true)
	}
}

// carryOut stores the publishes of the waiting connections and posts their slots. If no connection
// waits, carryOut returns false, and the loop owns the commit again.
func (c *commit) carryOut() bool {
	c.mu.Lock()
	c.slots, c.mu.waiting = c.mu.waiting, c.slots[:0]
	found := len(c.slots) > 0
	c.mu.running = found
	c.mu.Unlock()
	if !found { // another goroutine may carry out c already
		return false
	}
	c.store()
	for _, s := range c.slots { // the first settle's fsync covers all slots
		s.client.settle()
		if s.verdict != mustWait {
			s.heldTask = task{}
		}
	}
	for _, s := range c.slots { // in a second loop, so that the event loop wakes up once for all
		s.completed.Store(true)
		s.post() // after completed is set, the slot may move to another event loop
	}
	clear(c.slots)
	return true
}

// store publishes for all slots.
func (c *commit) store() {
	now, bytes := clock.Mono(), 0
	for _, s := range c.slots {
		op := &s.heldTask.op
		to := s.client.pubs.target(op.Topic, publisherOf(op))
		if op.Kind == session.OpMpub || to == nil || to.topic != c.topic { // to differs if the topic was deleted
			s.client.pubs.committing = true
			s.verdict, s.err = s.client.carryOut(&s.heldTask, now)
			s.client.pubs.committing = false
			continue
		}
		s.client.flushFins(now)
		c.stored = append(c.stored, s)
		p := s.client.pubs.message(op, s.client.arrival(&s.heldTask))
		p.From, p.Stored = to.publisher, &s.client.pubs.stored
		c.pubs = append(c.pubs, p)
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
			// On its own, the publish can go to the recreated topic or to another broker.
			s.client.pubs.leaveTopic(c.topic)
			s.verdict, s.err = mustWait, nil
			continue
		case err != nil && s.client.mqtt.Patient(&s.heldTask.op) && mqtt.IsTemporary(Refusal(s.heldTask.op.Topic, err)):
			s.client.pubs.alone = true
			s.verdict, s.err = mustWait, nil
			continue
		case err != nil:
			s.client.answerPublish(&s.heldTask.op, c.topic, Refusal(s.heldTask.op.Topic, err))
		default:
			add(&s.client.stats.counter(c.topic.Name()).count, 1) // the publisher may have moved since store
			s.client.answerPublish(&s.heldTask.op, c.topic, nil)
		}
		s.verdict, s.err = carriedOut, nil
		s.client.r += s.heldTask.n
	}
	clear(c.pubs)
	clear(c.stored)
	clear(c.errs)
	c.pubs, c.stored = c.pubs[:0], c.stored[:0]
}
