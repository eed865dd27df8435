//go:build linux

package load

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/mono"
)

// Result holds the measurements of one run. Unknown values are nil.
type Result struct {
	Scenario string `json:"scenario"`
	Peer     string `json:"peer"`
	Round    int    `json:"round"`
	Error    string `json:"error,omitempty"` // if set, other fields are meaningless

	Sent      int `json:"sent"`
	Accepted  int `json:"accepted"`  // acknowledged by the broker
	Delivered int `json:"delivered"` // to all measured channels
	Missing   int `json:"missing"`   // deliveries

	// Latency from the due time to the delivery, in milliseconds, over all channels.
	P50  float64 `json:"p50_ms"`
	P90  float64 `json:"p90_ms"`
	P99  float64 `json:"p99_ms"`
	P999 float64 `json:"p999_ms"`
	Max  float64 `json:"max_ms"`

	// Acked has the quantiles 0.5, 0.99 and 0.999 of the time from the due time to the reply,
	// in milliseconds, if the scenario asks for them.
	Acked []float64 `json:"acked_ms,omitempty"`

	Late         float64 `json:"late_p99_ms"` // delay of the sender after the due time
	InPerSecond  float64 `json:"in_per_s"`    // from the first message to the last reply, or write
	OutPerSecond float64 `json:"out_per_s"`   // per channel, from the first message or request

	Storm       float64  `json:"storm_per_s,omitempty"` // short-lived connections
	CPU         float64  `json:"cpu_us_per_message"`    // broker's processor time per message sent
	Load        float64  `json:"load_us_per_message"`   // this process's processor time per message sent
	Others      float64  `json:"others_percent"`        // share of other processes in all processor time
	RSS         float64  `json:"rss_mb"`                // of all the broker's processes, at the end
	PerConn     float64  `json:"bytes_per_connection"`
	Mallocs     *float64 `json:"mallocs_per_message,omitempty"`
	Collections *float64 `json:"gc_cycles,omitempty"`

	// Only of our broker, if the sender keeps a contract: times from arrival, as the broker
	// stamped it, to eligible, and from arrival to leaving the topic.
	Access *Quantiles `json:"access,omitempty"`
	Left   *Quantiles `json:"left,omitempty"`
}

// Perform starts a broker, performs the scenario and stops the broker. At a given rate,
// Perform measures for lasting, after Warming.
//
// Requires: GOMAXPROCS is Procs plus the number of busy threads.
func Perform(ctx context.Context, p Broker, s Scenario, lasting time.Duration, seed uint64) (r Result, err error) {
	b, err := p.start(s)
	if err != nil {
		return r, err
	}
	defer func() {
		if b.stop(); err == nil && p.AfterExit != nil {
			err = p.AfterExit(b.at, s, &r)
		} else if err != nil && b.Output() != "" {
			err = fmt.Errorf("%w; the broker's output: %.500s", err, b.Output())
		}
		err = errors.Join(err, os.RemoveAll(b.at.Dir))
	}()

	if p.Prepare != nil {
		if err := p.Prepare(ctx, b.at); err != nil {
			return r, err
		}
	}
	var subs []*subscriber
	defer func() {
		for _, sub := range subs {
			sub.close()
		}
	}()
	for i := range s.Channels * max(1, s.Topics) {
		sub, err := subscribe(b, s, p.Dialect, source{s.topic(i / s.Channels), fmt.Sprint("c", i%s.Channels)}, 0)
		if err != nil {
			return r, err
		}
		subs = append(subs, sub)
	}
	measured := subs
	if s.Slow {
		sub, err := subscribe(b, s, p.Dialect, source{Topic, "slow"}, 10*time.Millisecond)
		if err != nil {
			return r, err
		}
		subs = append(subs, sub)
	}
	before, err := b.memory()
	if err != nil {
		return r, err
	}
	pubs, err := Connect(b.publish, s, p.Dialect)
	if err != nil {
		return r, err
	}
	defer pubs.Close()
	time.Sleep(200 * time.Millisecond) // until the broker has accepted all connections
	with, err := b.memory()
	if err != nil {
		return r, err
	}
	r.PerConn = float64(with-before) / float64(s.Conns)

	asking, _, err := b.heap(ctx)
	if err != nil {
		return r, err
	}
	used, served, err := b.heap(ctx)
	if err != nil {
		return r, err
	}
	usedBefore, err := readUsage(b)
	if err != nil {
		return r, err
	}
	defer Spin(s.Busy)()
	start := clock.Mono()
	warm := start
	if s.Rate > 0 {
		warm = start.Add(Warming)
	}
	if !s.Late {
		for _, sub := range subs {
			sub.start(warm)
		}
	}
	storm := func() (int, error) { return 0, nil }
	if s.Storm > 0 {
		storm = stormAt(b.at.TCP, s.Storm, p.Dialect)
	}
	switch {
	case s.Rate > 0:
		r.Sent, err = pubs.Send(ctx, start, Warming+lasting, seed)
	case s.Closed:
		r.Sent, err = pubs.converse(ctx, lasting)
	case s.Limit == 0:
		r.Sent, err = pubs.flood(ctx, lasting)
	default:
		r.Sent, err = pubs.flood(ctx, longest)
	}
	opened, stormed := storm()
	r.Storm = float64(opened) / clock.Mono().Sub(start).Seconds()
	if err = errors.Join(err, stormed); err != nil {
		return r, err
	}
	sent := clock.Mono()
	if p.answers != nil {
		if err := pubs.settle(ctx, r.Sent); err != nil {
			return r, fmt.Errorf("%d of %d messages were accepted: %w", pubs.accepted.Load(), r.Sent, err)
		}
		r.Accepted, sent = int(pubs.accepted.Load()), clock.Mono()
	}
	r.InPerSecond = float64(r.Sent) / sent.Sub(start).Seconds()
	requested := start // time of the subscribers' first request
	if s.Late {
		requested = clock.Mono()
		for _, sub := range subs {
			sub.start(mono.Time(0))
		}
	}
	// Brokers need not deliver every message; missing messages are counted.
	waited := until(ctx, clock.Mono().Add(patience), func() bool {
		delivered := int64(0)
		for _, sub := range measured {
			delivered += sub.delivered.Load()
		}
		return delivered >= int64(r.Sent*s.Channels)
	}, func() error {
		for _, sub := range measured {
			if err := sub.failure(); err != nil {
				return err
			}
		}
		return pubs.failure()
	})
	if waited != nil && !errors.Is(waited, errLate) {
		return r, waited
	}
	spent, err := readUsage(b)
	if err != nil {
		return r, err
	}
	spent = spent.since(usedBefore)
	after, err := b.memory() // before the next heap request, which allocates memory
	if err != nil {
		return r, err
	}
	usedAfter, _, err := b.heap(ctx)
	if err != nil {
		return r, err
	}
	if p.BeforeStop != nil {
		if err := p.BeforeStop(ctx, b.at); err != nil {
			return r, err
		}
	}
	all := histogram.NewLatency()
	last := requested
	for _, sub := range measured {
		sub.close()
		r.Delivered += int(sub.delivered.Load())
		last = max(last, mono.Time(sub.last.Load()))
		all.Merge(sub.latency)
	}
	if r.Missing = r.Sent*s.Channels - r.Delivered; r.Delivered == 0 {
		return r, errors.New("the broker delivered no message")
	}
	r.P50, r.P90, r.P99, r.P999, r.Max = ms(all.Quantile(.5)), ms(all.Quantile(.9)), ms(all.Quantile(.99)), ms(all.Quantile(.999)), ms(all.Quantile(1))
	if s.Rate > 0 {
		r.Late = ms(pubs.late.Quantile(.99))
	}
	if pubs.acked != nil {
		pubs.stopReading()
		r.Acked = []float64{ms(pubs.acked.Quantile(.5)), ms(pubs.acked.Quantile(.99)), ms(pubs.acked.Quantile(.999))}
	}
	r.OutPerSecond = float64(r.Delivered) / float64(s.Channels) / last.Sub(requested).Seconds()
	r.CPU = 1e6 * spent.broker / float64(r.Sent)
	r.Load = 1e6 * spent.load / float64(r.Sent)
	r.Others = spent.others()
	r.RSS = float64(after) / (1 << 20)
	if served {
		// A heap request allocates thousands of objects. The last request cost about as
		// much as the request before.
		objects := usedAfter.mallocs - used.mallocs - (used.mallocs - asking.mallocs)
		mallocs, collections := max(0, float64(objects)/float64(r.Sent)), float64(usedAfter.collections-used.collections)
		r.Mallocs, r.Collections = &mallocs, &collections
	}
	return r, nil
}

func ms(d time.Duration) float64 { return float64(d) / 1e6 }

var errLate = errors.New("timed out")

// until waits until done returns true. until returns the first error of failed, or errLate
// after the deadline.
func until(ctx context.Context, deadline mono.Time, done func() bool, failed func() error) error {
	for !done() {
		if err := errors.Join(ctx.Err(), failed()); err != nil {
			return err
		}
		if deadline.Before(clock.Mono()) {
			return errLate
		}
		time.Sleep(time.Millisecond)
	}
	return nil
}
