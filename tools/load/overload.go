//go:build linux

package load

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/tools/iotpub/payload"
)

// Overload describes publishers that offer more than a subscriber processes.
type Overload struct {
	Rate         float64   // subscriber's rate, msg/s
	Demand       []float64 // rate of each publisher, msg/s
	Size         int       // bytes per message; at least payload.Size
	Warm, Steady time.Duration
}

// Overloaded is the result of an Overload.
type Overloaded struct {
	Delivered []float64 // rate of each publisher, msg/s
	// Line is the number of messages sent but not delivered, at the end. LineP99 is the
	// 99th percentile of samples taken every 50 ms.
	Line, LineP99 int64
	Latency       []time.Duration // p99 of each publisher, from the due time
}

// Overload starts the broker and runs an Overload.
func (b Broker) Overload(ctx context.Context, o Overload) (_ *Overloaded, err error) {
	r, err := b.start(Scenario{})
	if err != nil {
		return nil, err
	}
	defer func() {
		r.stop()
		err = errors.Join(err, os.RemoveAll(r.at.Dir))
	}()
	ctx, end := context.WithCancel(ctx)
	running, ctx := errgroup.WithContext(ctx)
	defer func() {
		end()
		if failed := running.Wait(); failed != nil { // the failure cancelled ctx
			err = failed
		}
	}()
	connect := func(hello func(net.Conn) error) (net.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, "tcp", r.at.TCP)
		if err != nil {
			return nil, err
		}
		context.AfterFunc(ctx, func() { c.Close() })
		return c, hello(c)
	}
	sub, err := connect(func(c net.Conn) error { return b.subscribe(c, overload) })
	if err != nil {
		return nil, fmt.Errorf("subscriber: %w", err)
	}
	s := &slowSubscriber{o: &o, d: &b.Dialect, c: sub, late: make([][]time.Duration, len(o.Demand))}
	running.Go(func() error { return s.run(ctx) })
	var sent atomic.Int64
	for i, demand := range o.Demand {
		c, err := connect(func(c net.Conn) error { return b.hello(c, fmt.Sprint("p", i)) })
		if err != nil {
			return nil, fmt.Errorf("publisher %d: %w", i, err)
		}
		if b.answers != nil {
			running.Go(func() error {
				_, _ = io.Copy(io.Discard, c) // returns when the publisher closes c
				return nil
			})
		}
		running.Go(func() error { return b.offer(ctx, c, i, demand, o.Size, &sent) })
	}
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	var lines []int64
	steady := clock.Mono().Add(o.Warm) // start of the measurement
	for measured := time.Duration(0); measured < o.Steady; {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-tick.C:
		}
		now := clock.Mono()
		if now.Before(steady) {
			continue
		}
		if len(lines) == 0 {
			steady = now
			s.measure()
		}
		measured = now.Sub(steady)
		lines = append(lines, sent.Load()-s.delivered.Load())
	}
	outcome := s.result(clock.Mono().Sub(steady))
	outcome.Line = lines[len(lines)-1]
	slices.Sort(lines)
	outcome.LineP99 = Quantile(lines, 0.99)
	return outcome, nil
}

// overload is the only channel.
var overload = source{Topic, "overload"}

// offer publishes at a rate without reading replies. A broker that stops reading blocks
// offer.
func (b Broker) offer(ctx context.Context, c net.Conn, i int, demand float64, size int, sent *atomic.Int64) error {
	frame, bodies := b.frame(target{Topic, fmt.Sprint("p", i)}, size, 1, false)
	gap, due := time.Duration(float64(time.Second)/demand), clock.Mono()
	for seq := uint16(1); ; seq++ {
		if !clock.Sleep(ctx, due.Sub(clock.Mono())) {
			return nil
		}
		payload.Append(frame[:bodies[0]], payload.Payload{Source: uint32(i), Intended: due}, size) // written in place
		if b.number != nil {
			b.number(frame, bodies, seq)
		}
		if _, err := c.Write(frame); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("publisher %d: %w", i, err)
		}
		sent.Add(1)
		due = due.Add(gap)
	}
}

// slowSubscriber processes messages at a limited rate.
type slowSubscriber struct {
	o         *Overload
	d         *Dialect
	c         net.Conn
	delivered atomic.Int64

	mu        sync.Mutex // guards the fields below
	measuring bool
	late      [][]time.Duration // latencies by publisher
}

func (s *slowSubscriber) measure() {
	s.mu.Lock()
	s.measuring = true
	s.mu.Unlock()
}

func (s *slowSubscriber) run(ctx context.Context) error {
	const credit = 100 // unacknowledged messages, if the protocol limits them
	out := s.d.ready(nil, overload, credit)
	if _, err := s.c.Write(out); err != nil {
		return err
	}
	in := make([]byte, 0, 1<<16)
	gap, due := time.Duration(float64(time.Second)/s.o.Rate), clock.Mono()
	for {
		n, err := s.c.Read(in[len(in):min(cap(in), len(in)+4096)])
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("subscriber: %w", err)
		}
		in = in[:len(in)+n]
		used, reply, err := s.d.deliveries(in, out[:0], overload, func(body []byte) {
			due = max(due, clock.Mono().Add(-100*time.Millisecond)).Add(gap)
			s.record(body)
		})
		if err != nil {
			return err
		}
		in = in[:copy(in[:cap(in)], in[used:])]
		if wait := due.Sub(clock.Mono()); wait > 0 {
			time.Sleep(wait)
		}
		if out = reply; len(out) > 0 {
			if _, err := s.c.Write(out); err != nil && ctx.Err() == nil {
				return err
			}
		}
	}
}

// record records the delivery of a message.
func (s *slowSubscriber) record(body []byte) {
	s.delivered.Add(1)
	p, ok := payload.Parse(body)
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := int(p.Source); ok && s.measuring && i < len(s.late) {
		s.late[i] = append(s.late[i], clock.Mono().Sub(p.Intended))
	}
}

// result returns the metrics since measure, and ends the measurement.
func (s *slowSubscriber) result(lasted time.Duration) *Overloaded {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.measuring = false
	outcome := &Overloaded{}
	for _, late := range s.late {
		outcome.Delivered = append(outcome.Delivered, float64(len(late))/lasted.Seconds())
		slices.Sort(late)
		outcome.Latency = append(outcome.Latency, Quantile(late, 0.99))
	}
	return outcome
}
