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

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/mono"
)

// subscriber receives the messages of a channel.
type subscriber struct {
	// set once
	c    net.Conn
	raw  *socket // socket below c
	d    Dialect
	from source
	slow time.Duration // processing time per message
	warm mono.Time     // messages due earlier are not measured; set before receive
	done chan struct{} // closed when receive has returned; nil before start

	// atomic
	stopped   atomic.Bool // ends receive
	delivered atomic.Int64
	last      atomic.Int64 // time of the latest delivery

	// owned by receive until done
	latency *histogram.Latency
	err     error
}

func subscribe(b *running, s Scenario, d Dialect, from source, slow time.Duration) (*subscriber, error) {
	c, raw, err := dial(b.at.TCP, s.TLS, d)
	if err != nil {
		return nil, fmt.Errorf("subscriber of %v: %w", from, err)
	}
	if err := errors.Join(d.subscribe(c, from), raw.setBlocking()); err != nil {
		return nil, errors.Join(fmt.Errorf("subscriber of %v: %w", from, err), raw.Close())
	}
	return &subscriber{c: c, raw: raw, d: d, from: from, slow: slow, latency: histogram.NewLatency()}, nil
}

// start requests messages and receives until close. Messages due before warm are not
// measured.
func (s *subscriber) start(warm mono.Time) {
	s.warm, s.done = warm, make(chan struct{})
	go func() {
		defer close(s.done)
		s.err = s.receive()
	}()
}

func (s *subscriber) receive() error {
	if err := lockUrgentThread(); err != nil {
		return err
	}
	want := credit
	if s.slow > 0 {
		want = 1
	}
	out := s.d.ready(nil, s.from, want)
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
		now, received := clock.Mono(), int64(0)
		used, reply, err := s.d.deliveries(in, out[:0], s.from, func(body []byte) {
			received++
			due := mono.Time(binary.LittleEndian.Uint64(body))
			if !due.Before(s.warm) {
				s.latency.Record(now.Sub(due))
			}
		})
		if err != nil {
			return err
		}
		in = in[:copy(in[:cap(in)], in[used:])]
		if out = reply; len(out) > 0 {
			if s.slow > 0 {
				time.Sleep(time.Duration(received) * s.slow)
			}
			if _, err := s.c.Write(out); err != nil {
				return err
			}
		}
		s.last.Store(int64(now))
		s.delivered.Add(received)
	}
	return net.ErrClosed
}

// failure returns why receive returned, or nil while receive runs.
func (s *subscriber) failure() error {
	select {
	case <-s.done:
		return fmt.Errorf("subscriber of %v: %w", s.from, s.err)
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
