package controller

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/learned"
	"github.com/srtm-io/srtm/loaddistributor/sizing"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
)

// maxProfiled is the maximum number of messages of a profile: 32 MB, and about as much
// again for the proposal. maxProfiles is the maximum number of concurrent profiles.
const maxProfiled, maxProfiles = 2_000_000, 4

// profile is the record for Profile. Guarded by the controller's lock.
type profile struct {
	trace             []tuner.Arrival
	from, until       mono.Time // the recorded period, including silence
	numbers           map[string]int32
	missing, recorded uint64        // before the profile began
	lost              float64       // lost fraction of the messages since the beginning
	wake              chan struct{} // 1 deep
	gone              chan struct{} // closed when the topic is deleted
	begun             bool
	windows           int // complete windows since the beginning
}

// tearsFor is the number of windows in which publishers may still become known. When a
// publisher becomes known, the record begins again, and so does the profile: the gap
// would look like silence.
const tearsFor = 4

// take adds a window.
func (p *profile) take(of *learned.Topic, job *learned.Job) {
	if job.Torn() && p.windows < tearsFor {
		p.trace, p.windows, p.begun, p.lost = nil, 0, false, 0
		return
	}
	missing, recorded := of.Missing()
	if !p.begun { // the first window began before the profile
		p.begun, p.missing, p.recorded, p.from = true, missing, recorded, job.Until()
		return
	}
	p.windows++
	p.until = job.Until()
	if all := missing - p.missing + recorded - p.recorded; all > 0 {
		p.lost = float64(missing-p.missing) / float64(all)
	}
	job.Arrivals(func(id string, at mono.Time) {
		n, known := p.numbers[id]
		if !known {
			n = int32(len(p.numbers))
			p.numbers[id] = n
		}
		if len(p.trace) < maxProfiled {
			p.trace = append(p.trace, tuner.Arrival{At: at, Publisher: n})
		} else {
			p.until = min(p.until, at)
		}
	})
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// Profiled is a proposal, and the fraction of messages missing from its record.
type Profiled struct {
	*sizing.Proposal
	Missing float64
}

// Profile records a topic's arrivals for the given time, or up to 2,000,000 messages, and
// proposes a contract. Once per learned.Window it calls progress with the number of
// messages. Errors: catalog.ErrTopicUnknown, at once when the topic is deleted;
// catalog.ErrTopicState if the topic is not active, is being profiled, or four others
// are; sizing.ErrShort; the errors of progress.
func (c *Controller) Profile(ctx context.Context, name string, lasts time.Duration, w sizing.Wanted, progress func(messages int) error) (Profiled, error) {
	if err := c.knowledge.following(); err != nil {
		return Profiled{}, err
	}
	p := &profile{numbers: map[string]int32{}, wake: make(chan struct{}, 1), gone: make(chan struct{})}
	c.mu.Lock()
	topic, known := c.cat.shown.Topic(name)
	ending := c.life.ending
	var err error
	switch {
	case c.life.closing:
		err = ErrClosing
	case !known:
		err = fmt.Errorf("topic %s: %w", name, catalog.ErrTopicUnknown)
	case !topic.Open():
		err = fmt.Errorf("topic %s is %v: %w", name, topic.State, catalog.ErrTopicState)
	case c.topics.peek(name).profile != nil:
		err = fmt.Errorf("topic %s is being profiled: %w", name, catalog.ErrTopicState)
	case c.profiles == maxProfiles:
		err = fmt.Errorf("topic %s: %d others are being profiled, and no more may be: %w", name, maxProfiles, catalog.ErrTopicState)
	default:
		c.profiles++
		c.topics.entry(name).profile = p
	}
	c.mu.Unlock()
	if err != nil {
		return Profiled{}, err
	}
	end := func() {
		if c.topics.peek(name).profile == p {
			c.topics.entry(name).profile = nil
		}
	}
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		end()
		c.profiles--
	}()
	// Records arrive by window, and the first window began before.
	windows := int((lasts + learned.Window - 1) / learned.Window)
	over := time.NewTimer(lasts + (2+2*tearsFor)*learned.Window)
	defer over.Stop()
	for going := true; going; {
		select {
		case <-p.wake:
			c.mu.RLock()
			n, whole := len(p.trace), p.windows >= windows
			c.mu.RUnlock()
			if err := progress(n); err != nil {
				return Profiled{}, err
			}
			going = n < maxProfiled && !whole
		case <-over.C:
			going = false
		case <-p.gone:
			return Profiled{}, fmt.Errorf("topic %s: %w", name, catalog.ErrTopicUnknown)
		case <-ending:
			return Profiled{}, ErrClosing
		case <-ctx.Done():
			return Profiled{}, context.Cause(ctx)
		}
	}
	c.mu.Lock()
	end()
	c.mu.Unlock()
	proposal, err := sizing.Propose(p.trace, p.from, p.until, w, rand.New(rand.NewPCG(c.cfg.Seed, uint64(len(p.trace)))))
	if err != nil {
		return Profiled{}, fmt.Errorf("topic %s, %d messages recorded: %w", name, len(p.trace), err)
	}
	return Profiled{proposal, p.lost}, nil
}
