package client

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/nsqio/go-nsq"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/pacing/header"
	pacing "github.com/srtm-io/srtm/pacing/sender"
)

// Pacing selects how a publisher reacts to the rate that its broker advises.
type Pacing uint8

const (
	// PacingWait: Publish waits for its turn, within its context.
	PacingWait Pacing = iota
	// PacingReport: Publish does not wait. Publisher.Pace and Config.OnPace inform callers
	// that reduce their own rate. A broker that polices refuses the excess.
	PacingReport
	// PacingOff: the publisher does not request advice.
	PacingOff
)

// Pace is the current advice of a publisher's broker.
type Pace struct {
	Paced   bool          // the topic is overloaded; otherwise Rate, Burst and Wait do not apply
	Rate    float64       // messages per second for this publisher
	Burst   int64         // messages at once
	Weight  uint8         // weight that the broker applies, at most Config.Weight
	Wait    time.Duration // until the next message is due
	Delayed time.Duration // total time that Publish has waited for its turn
}

// pacer keeps a publisher to its advised rate.
type pacer struct {
	mode   Pacing
	notify func(Pace) // may be nil

	mu struct {
		sync.Mutex
		bucket  pacing.Bucket
		weight  uint8
		delayed time.Duration
		changed chan struct{} // closed and replaced on each advice
	}
}

func newPacer(mode Pacing, notify func(Pace)) *pacer {
	p := &pacer{mode: mode, notify: notify}
	p.mu.changed = make(chan struct{})
	return p
}

// advise applies the broker's advice.
func (p *pacer) advise(ok header.OK) {
	p.mu.Lock()
	p.mu.weight = ok.Weight
	p.mu.bucket.Advise(pacing.Advice{Paced: ok.Paced, Overload: ok.Overload, Rate: ok.Rate, Burst: ok.Burst, Interval: ok.Interval}, clock.Mono())
	p.changedLocked()
	p.mu.Unlock()
	if p.notify != nil {
		p.notify(p.pace())
	}
}

// reset forgets the advice of a former broker.
func (p *pacer) reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.bucket = pacing.Bucket{}
	p.changedLocked()
}

func (p *pacer) changedLocked() {
	close(p.mu.changed)
	p.mu.changed = make(chan struct{})
}

func (p *pacer) pace() Pace {
	p.mu.Lock()
	defer p.mu.Unlock()
	state := p.mu.bucket.Pace(clock.Mono())
	return Pace{Paced: state.Paced, Rate: state.Rate.PerSecond(), Burst: state.Burst, Weight: p.mu.weight, Wait: state.Wait, Delayed: p.mu.delayed}
}

// wait returns nil when n messages may be sent, or an error.
func (p *pacer) wait(ctx context.Context, n int, closing <-chan struct{}) error {
	for {
		now := clock.Mono()
		p.mu.Lock()
		if p.mode != PacingWait {
			p.mu.bucket.Report(n, now)
			p.mu.Unlock()
			return nil
		}
		d, changed := p.mu.bucket.Wait(n, now), p.mu.changed
		p.mu.Unlock()
		if d <= 0 {
			return nil
		}
		timer := time.NewTimer(d)
		var err error
		select {
		case <-timer.C:
		case <-changed:
		case <-closing:
			err = ErrClosed
		case <-ctx.Done():
			err = fmt.Errorf("not sent: %w", ctx.Err())
		}
		timer.Stop()
		p.mu.Lock()
		p.mu.delayed += clock.Mono().Sub(now)
		p.mu.Unlock()
		if err != nil {
			return fmt.Errorf("client: %w", err)
		}
	}
}

// Pace returns the current advice.
func (p *Publisher) Pace() Pace { return p.pacer.pace() }

// errNoPace: the broker does not support PACE.
var errNoPace = errors.New("broker knows no pacing")

// askTimeout bounds the wait for the answer to PACE.
const askTimeout = 5 * time.Second

// askPace sends PACE and waits for the answer. A broker without PACE hangs up, and would
// lose commands that follow.
func (r *route) askPace(ctx context.Context, weight uint8) error {
	reply := make(chan error, 1)
	r.in.Lock()
	r.in.paceReply = reply
	r.in.Unlock()
	cmd := &nsq.Command{Name: []byte("PACE"), Params: [][]byte{[]byte(strconv.Itoa(header.Version)), []byte(strconv.Itoa(int(weight)))}}
	if err := r.conn.Send(cmd); err != nil {
		return fmt.Errorf("ask broker %s for its pace: %w", r.address, err)
	}
	timer := time.NewTimer(askTimeout)
	defer timer.Stop()
	select {
	case err := <-reply:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-timer.C:
		return fmt.Errorf("broker %s did not answer PACE within %v", r.address, askTimeout)
	}
}
