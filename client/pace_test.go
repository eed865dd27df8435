package client

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/pacing/header"
	"github.com/srtm-io/srtm/tokenbucket"
)

func paced(milli, burst int64) header.OK {
	return header.OK{Paced: true, Weight: 3, Interval: time.Minute, Rate: tokenbucket.Rate(milli), Burst: burst}
}

// Publishing keeps the advised pace, from the first advice to the last.
func TestPublishWaitsForItsTurn(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		advised := 0
		p := newPacer(PacingWait, func(Pace) { advised++ })
		wait := func(n int) time.Duration {
			began := time.Now()
			testkit.Must(t, p.wait(context.Background(), n, nil))
			return time.Since(began)
		}
		for range 100 {
			if d := wait(1); d > 0 {
				t.Fatalf("waited %v without advice", d)
			}
		}
		p.advise(paced(10_000, 1)) // 10 a second
		began := time.Now()
		for range 21 {
			wait(1)
		}
		if d := time.Since(began); d < 2*time.Second || d > 2200*time.Millisecond {
			t.Errorf("21 messages at 10 a second took %v", d)
		}
		is := p.pace()
		if !is.Paced || is.Rate != 10 || is.Burst != 1 || is.Weight != 3 || is.Delayed < 2*time.Second-100*time.Millisecond || advised != 1 {
			t.Errorf("%+v, advised %d times", is, advised)
		}
		p.reset() // another broker
		if d := wait(1000); d > 0 || p.pace().Paced {
			t.Errorf("waited %v for a broker that was left", d)
		}
	})
}

// A wait ends with its context and with the publisher. A publisher that only reports does not wait.
func TestPacedWaitEndsWithContextAndPublisher(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		p := newPacer(PacingWait, nil)
		p.advise(paced(10_000, 1))
		for range 2 {
			_ = p.wait(context.Background(), 50, nil) // many turns ahead
		}
		ctx, stop := context.WithTimeout(context.Background(), time.Millisecond)
		defer stop()
		if err := p.wait(ctx, 1, nil); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, ErrUnanswered) {
			t.Errorf("%v", err)
		}
		closing := make(chan struct{})
		close(closing)
		testkit.ErrorIs(t, p.wait(context.Background(), 1, closing), ErrClosed)
		go p.advise(header.OK{Weight: 3, Interval: time.Second})
		if err := p.wait(context.Background(), 1, nil); err != nil {
			t.Errorf("%v when all may send freely again", err)
		}
		r := newPacer(PacingReport, nil)
		r.advise(paced(10_000, 1))
		began := time.Now()
		for range 20 {
			_ = r.wait(ctx, 1, nil)
		}
		if is := r.pace(); time.Since(began) > 0 || is.Wait < time.Second {
			t.Errorf("after 20 messages in %v: %+v", time.Since(began), is)
		}
	})
}
