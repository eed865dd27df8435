//go:build linux

package load

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"time"

	hdr "github.com/HdrHistogram/hdrhistogram-go"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
)

// Range of latencies, in nanoseconds.
const (
	minLatency = int64(time.Microsecond)
	maxLatency = int64(time.Minute)
)

func newHistogram() *hdr.Histogram { return hdr.New(minLatency, maxLatency, 3) }

// record records d, clipped to the histogram's range.
func record(h *hdr.Histogram, d time.Duration) {
	_ = h.RecordValue(min(max(int64(d), minLatency), maxLatency)) // clipped to the range
}

// subscriber receives the messages of a channel.
type subscriber struct {
	// set once
	c       net.Conn
	raw     *socket // socket below c
	d       Dialect
	channel string
	slow    time.Duration // processing time per message
	from    mono.Time     // messages due earlier are not measured; set before receive
	done    chan struct{} // closed when receive has returned; nil before start

	// atomic
	stopped   atomic.Bool // tells receive to return
	delivered atomic.Int64
	last      atomic.Int64 // time of the latest delivery

	// owned by receive until done
	latency *hdr.Histogram
	err     error
}

func subscribe(b *running, s Scenario, d Dialect, channel string, slow time.Duration) (*subscriber, error) {
	c, raw, err := dial(b.at.TCP, s.TLS, d)
	if err != nil {
		return nil, fmt.Errorf("subscriber of %s: %w", channel, err)
	}
	if err := errors.Join(d.subscribe(c, channel), raw.wait()); err != nil {
		return nil, errors.Join(fmt.Errorf("subscriber of %s: %w", channel, err), raw.Close())
	}
	return &subscriber{c: c, raw: raw, d: d, channel: channel, slow: slow, latency: newHistogram()}, nil
}

// start requests messages and receives until close.
func (s *subscriber) start(from mono.Time) {
	s.from, s.done = from, make(chan struct{})
	go func() {
		defer close(s.done)
		s.err = s.receive()
	}()
}

func (s *subscriber) receive() error {
	if err := prompt(); err != nil {
		return err
	}
	want := credit
	if s.slow > 0 {
		want = 1
	}
	out := s.d.ready(nil, s.channel, want)
	if _, err := s.c.Write(out); err != nil {
		return err
	}
	in := make([]byte, 0, 1<<18)
	for !s.stopped.Load() {
		if len(in) == cap(in) {
			in = append(make([]byte, 0, 2*cap(in)), in...) // for a message larger than the buffer
		}
		n, err := s.c.Read(in[len(in):cap(in)])
		if errors.Is(err, os.ErrDeadlineExceeded) {
			continue
		}
		if err != nil {
			return err
		}
		in = in[:len(in)+n]
		now, got := clock.Mono(), int64(0)
		used, reply, err := s.d.deliveries(in, out[:0], s.channel, func(body []byte) {
			got++
			due := mono.Time(binary.LittleEndian.Uint64(body))
			if !due.Before(s.from) {
				record(s.latency, now.Sub(due))
			}
		})
		if err != nil {
			return err
		}
		in = in[:copy(in[:cap(in)], in[used:])]
		if out = reply; len(out) > 0 {
			if s.slow > 0 {
				time.Sleep(time.Duration(got) * s.slow)
			}
			if _, err := s.c.Write(out); err != nil {
				return err
			}
		}
		s.last.Store(int64(now))
		s.delivered.Add(got)
	}
	return net.ErrClosed
}

// failure returns why receive returned, or nil while receive runs.
func (s *subscriber) failure() error {
	select {
	case <-s.done:
		return fmt.Errorf("subscriber of %s: %w", s.channel, s.err)
	default:
		return nil
	}
}

// close stops the subscriber and waits for receive, if it was started.
func (s *subscriber) close() {
	s.stopped.Store(true)
	if s.done != nil {
		<-s.done
	}
	_ = s.raw.Close()
}
