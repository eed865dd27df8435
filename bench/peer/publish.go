//go:build linux

package main

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/kernel/stamp"
)

// publishers are the connections that messages go in by.
type publishers struct {
	// set once
	s       scenario
	d       dialect
	conns   []*publisher
	readers sync.WaitGroup

	// atomic: added to by the readers of answers
	accepted atomic.Int64
	stopped  atomic.Bool // they are to end

	mu  sync.Mutex
	err error // guarded by mu; the first
}

// publisher is one connection.
type publisher struct {
	c  net.Conn
	fd int // of c, where bytes go in and out as they are; -1 under TLS

	// owned by the reader of answers
	rest []byte

	// owned by the sender
	frame  []byte
	bodies []int
	seq    uint16
}

func (p *publishers) fail(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err == nil {
		p.err = err
	}
}

func (p *publishers) failure() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// dial opens a connection to the broker, under TLS if the scenario says so.
func dial(ctx context.Context, b *process, s scenario, d dialect) (net.Conn, error) {
	var dialer net.Dialer
	dialer.SetMultipathTCP(false)
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	c, err := dialer.DialContext(ctx, "tcp", b.at.tcp)
	if err != nil {
		return nil, err
	}
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	if s.tls {
		t, err := upgrade(c, d.identify)
		if err != nil {
			return nil, errors.Join(err, c.Close())
		}
		return t, nil
	}
	return c, nil
}

func connect(ctx context.Context, b *process, s scenario, d dialect) (*publishers, error) {
	p := &publishers{s: s, d: d}
	for i := range s.conns {
		c, err := dial(ctx, b, s, d)
		if err != nil {
			p.close()
			return nil, fmt.Errorf("publisher %d: %w", i, err)
		}
		one := &publisher{c: c, fd: -1}
		p.conns = append(p.conns, one)
		if err := errors.Join(d.hello(c, fmt.Sprintf("p%d", i)), c.SetDeadline(time.Time{})); err != nil {
			p.close()
			return nil, fmt.Errorf("publisher %d: %w", i, err)
		}
		if one.fd, err = descriptor(c); err != nil {
			p.close()
			return nil, err
		}
	}
	return p, nil
}

// close ends the connections and whoever reads them.
func (p *publishers) close() {
	p.stopped.Store(true)
	for _, one := range p.conns {
		if _, is := one.c.(*tls.Conn); is {
			_ = one.c.Close() // ends its reader
		}
	}
	p.readers.Wait()
	for _, one := range p.conns {
		_ = one.c.Close()
	}
}

// read starts the readers of answers: one for all connections, or one for each
// under TLS.
func (p *publishers) read() error {
	if p.s.tls {
		for _, one := range p.conns {
			p.readers.Go(func() {
				buf := make([]byte, 4096)
				for {
					n, err := one.c.Read(buf)
					if err == nil {
						err = p.answered(one, buf[:n])
					}
					if err != nil {
						if !p.stopped.Load() {
							p.fail(fmt.Errorf("publisher: %w", err))
						}
						return
					}
				}
			})
		}
		return nil
	}
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return fmt.Errorf("epoll: %w", err)
	}
	for i, one := range p.conns {
		if err := unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, one.fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(i)}); err != nil {
			return errors.Join(fmt.Errorf("epoll: %w", err), unix.Close(ep))
		}
	}
	p.readers.Go(func() {
		defer unix.Close(ep)
		if err := errors.Join(prompt(), p.poll(ep)); err != nil {
			p.fail(err)
		}
	})
	return nil
}

// poll reads answers as they come, from all connections.
func (p *publishers) poll(ep int) error {
	events, buf := make([]unix.EpollEvent, 256), make([]byte, 1<<16)
	for !p.stopped.Load() {
		n, err := unix.EpollWait(ep, events, 50)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("epoll: %w", err)
		}
		for _, e := range events[:max(n, 0)] {
			one := p.conns[e.Fd]
			k, err := unix.Read(one.fd, buf)
			switch {
			case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR):
				continue
			case err != nil:
				return fmt.Errorf("publisher %d: %w", e.Fd, err)
			case k == 0:
				return fmt.Errorf("publisher %d: the broker ends the connection", e.Fd)
			}
			if err := p.answered(one, buf[:k]); err != nil {
				return fmt.Errorf("publisher %d: %w", e.Fd, err)
			}
		}
	}
	return nil
}

// answered counts what the broker accepts by data.
func (p *publishers) answered(one *publisher, data []byte) error {
	if p.d.answers == nil {
		return nil
	}
	perFrame := 1
	if p.s.batch {
		perFrame = p.s.together
	}
	if len(one.rest) > 0 {
		one.rest = append(one.rest, data...)
		data = one.rest
	}
	n, used, err := p.d.answers(data, perFrame)
	one.rest = append(one.rest[:0], data[used:]...)
	p.accepted.Add(int64(n))
	return err
}

// prepare makes the frame that a connection sends, again and again.
func (p *publishers) prepare(one *publisher) {
	one.frame, one.bodies = p.d.frame(p.s.size, p.s.together, p.s.batch)
}

// publish writes the messages that were due at an instant.
func (p *publishers) publish(one *publisher, due stamp.Mono) error {
	for _, at := range one.bodies {
		binary.LittleEndian.PutUint64(one.frame[at:], uint64(due))
	}
	if p.d.number != nil {
		p.d.number(one.frame, one.bodies, one.seq)
		one.seq++
	}
	if one.fd < 0 {
		_, err := one.c.Write(one.frame)
		return err
	}
	for rest := one.frame; len(rest) > 0; {
		n, err := unix.Write(one.fd, rest)
		switch {
		case err == nil:
			rest = rest[n:]
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN):
			// The broker does not read. Everybody behind is late now, and counts it.
			if ok, err := await(one.fd, unix.POLLOUT, patience); err != nil {
				return err
			} else if !ok {
				return errors.New("the broker reads nothing")
			}
		default:
			return err
		}
	}
	return nil
}

// send sends at the scenario's rate for a time: messages on random connections,
// so that each connection's are at random times. It returns how many it sent.
// The frames of connections are small and many: they share one, but where the
// broker numbers them.
func (p *publishers) send(ctx context.Context, start stamp.Mono, lasting time.Duration, seed uint64) (sent int, err error) {
	var sender sync.WaitGroup
	sender.Go(func() { sent, err = p.sendNow(ctx, start, lasting, seed) })
	sender.Wait()
	return sent, err
}

func (p *publishers) sendNow(ctx context.Context, start stamp.Mono, lasting time.Duration, seed uint64) (sent int, err error) {
	if err := prompt(); err != nil {
		return 0, err
	}
	rng := rand.New(rand.NewPCG(seed, 0))
	frame, bodies := p.d.frame(p.s.size, p.s.together, p.s.batch)
	end, due := start.Add(lasting), start
	for ctx.Err() == nil {
		due = due.Add(time.Duration(rng.ExpFloat64() / p.s.rate * float64(p.s.together) * 1e9))
		if !due.Before(end) {
			return sent, p.failure()
		}
		for clock.Mono().Before(due) {
			at := unix.NsecToTimespec(int64(due))
			if err := unix.ClockNanosleep(unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME, &at, nil); err != nil && !errors.Is(err, unix.EINTR) {
				return sent, fmt.Errorf("sleep: %w", err)
			}
		}
		one := p.conns[rng.IntN(len(p.conns))]
		one.frame, one.bodies = frame, bodies
		if err := p.publish(one, due); err != nil {
			return sent, errors.Join(err, p.failure())
		}
		sent += p.s.together
	}
	return sent, ctx.Err()
}

// flood sends as fast as it goes in, up to the scenario's limit or a time.
func (p *publishers) flood(ctx context.Context, longest time.Duration) (sent int, err error) {
	var total atomic.Int64
	var senders sync.WaitGroup
	end := clock.Mono().Add(longest)
	for _, one := range p.conns {
		p.prepare(one)
		senders.Go(func() {
			for ctx.Err() == nil && p.failure() == nil {
				now := clock.Mono()
				if !now.Before(end) {
					return
				}
				if total.Add(int64(p.s.together)) > int64(p.s.limit) {
					total.Add(-int64(p.s.together))
					return
				}
				if err := p.publish(one, now); err != nil {
					p.fail(err)
					return
				}
			}
		})
	}
	senders.Wait()
	return int(total.Load()), errors.Join(p.failure(), ctx.Err())
}
