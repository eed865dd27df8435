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

// maxProfiled is how many messages a profile is made of at most, 32 MB and about as much
// while the proposal is made, and maxProfiles how many are made at a time.
const maxProfiled, maxProfiles = 2_000_000, 4

// profile is what is recorded for Profile. Guarded by state's lock.
type profile struct {
	trace             []tuner.Arrival
	from, until       mono.Time // what it is of, silence included
	numbers           map[string]int32
	missing, recorded uint64        // before it began
	lost              float64       // part of the messages since then
	wake              chan struct{} // room for one
	gone              chan struct{} // closed when the topic is
	begun             bool
	windows           int // whole ones, since it began
}

// tearsFor is how many windows it takes for publishers to become known. For each that does the
// record begins anew, and with it a profile: what is missing in between would pass for silence.
const tearsFor = 4

// take adds a window.
func (p *profile) take(of *learned.Topic, job *learned.Job) {
	if job.Torn() && p.windows < tearsFor {
		p.trace, p.windows, p.begun, p.lost = nil, 0, false, 0
		return
	}
	missing, recorded := of.Missing()
	if !p.begun { // of a window that had begun before
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

// Profiled is a proposal, and the part of the messages that it does not know of.
type Profiled struct {
	*sizing.Proposal
	Missing float64
}

// Profile has a topic's arrivals recorded for so long, or until there are 2,000,000, and
// proposes a contract. progress is told how many there are, once in a learned.Window. Errors:
// catalog.ErrTopicUnknown, at once when the topic is gone; catalog.ErrTopicState if it is not
// active, or profiled already, or four other topics are; sizing.ErrShort; those of progress.
func (c *Controller) Profile(ctx context.Context, name string, lasts time.Duration, w sizing.Wanted, progress func(messages int) error) (Profiled, error) {
	if err := c.mu.following(); err != nil {
		return Profiled{}, err
	}
	p := &profile{numbers: map[string]int32{}, wake: make(chan struct{}, 1), gone: make(chan struct{})}
	c.mu.Lock()
	topic, known := c.mu.cat.Topic(name)
	ending := c.mu.ending
	var err error
	switch {
	case c.mu.closing:
		err = ErrClosing
	case !known:
		err = fmt.Errorf("topic %s: %w", name, catalog.ErrTopicUnknown)
	case !topic.Open():
		err = fmt.Errorf("topic %s is %v: %w", name, topic.State, catalog.ErrTopicState)
	case c.mu.topics.see(name).profile != nil:
		err = fmt.Errorf("topic %s is being profiled: %w", name, catalog.ErrTopicState)
	case c.mu.profiles == maxProfiles:
		err = fmt.Errorf("topic %s: %d others are being profiled, and no more may be: %w", name, maxProfiles, catalog.ErrTopicState)
	default:
		c.mu.profiles++
		c.mu.topics.at(name).profile = p
	}
	c.mu.Unlock()
	if err != nil {
		return Profiled{}, err
	}
	end := func() {
		if c.mu.topics.see(name).profile == p {
			c.mu.topics.at(name).profile = nil
		}
	}
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		end()
		c.mu.profiles--
	}()
	// What is recorded comes by the window, of which the first had begun before.
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
