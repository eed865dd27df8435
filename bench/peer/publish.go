//go:build linux

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	hdr "github.com/HdrHistogram/hdrhistogram-go"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
)

// publishers are the connections that messages go in by.
type publishers struct {
	// set once
	s     scenario
	d     dialect
	conns []*publisher

	reader  sync.WaitGroup // of answers, in a flood
	stopped atomic.Bool    // it is to end

	late *hdr.Histogram // owned by the sender until it ends: when messages went out, from when they were due

	// atomic: added to by whoever reads answers
	accepted atomic.Int64

	mu  sync.Mutex
	err error // guarded by mu; the first
}

// publisher is one connection.
type publisher struct {
	c   net.Conn
	raw *socket // of c

	// owned by the sender
	frame  []byte
	bodies []int
	seq    uint16
	sent   int // messages

	// owned by whoever reads answers: the sender, or the reader in a flood, and
	// settle when both have ended
	answered int // messages
	rest     []byte
}

// unread is how many frames a publisher sends before it reads their answers. The
// broker writes them as ever, and a few hundred bytes wait in the socket; but this
// process does not wake for each.
const (
	unread     = 8
	answerSize = 1 << 16 // bytes read at once
)

// Above a rate of frames per second that is crowded the sender wakes no more often
// than once in a nap, and then sends all that is due. Latency counts from when each
// was due all the same. 40,000 timers a second cost this process a fifth of its time,
// and delay what they are for where the broker needs two processors.
const (
	crowded = 30_000
	nap     = 50 * time.Microsecond
)

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

func connect(b *process, s scenario, d dialect) (*publishers, error) {
	p := &publishers{s: s, d: d, late: newHistogram()}
	for i := range s.conns {
		c, raw, err := dial(b, s, d)
		if err == nil {
			p.conns = append(p.conns, &publisher{c: c, raw: raw})
			err = errors.Join(d.hello(c, fmt.Sprintf("p%d", i)), raw.dontWait())
		}
		if err != nil {
			p.close()
			return nil, fmt.Errorf("publisher %d: %w", i, err)
		}
	}
	return p, nil
}

// close ends the connections and whoever reads them.
func (p *publishers) close() {
	p.stopped.Store(true)
	p.reader.Wait()
	for _, one := range p.conns {
		_ = one.raw.Close() // without TLS' farewell: the broker is to end, too
	}
}

// collect reads the answers that are there, if the broker says any.
func (p *publishers) collect(one *publisher, buf []byte) error {
	if p.d.answers == nil {
		return nil
	}
	n, err := one.c.Read(buf)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("publisher: %w", err)
	}
	return p.count(one, buf[:n])
}

// settle reads the answers that are still owed, until all are there, or it takes
// too long.
func (p *publishers) settle(ctx context.Context, sent int) error {
	buf := make([]byte, answerSize)
	return until(ctx, clock.Mono().Add(patience), func() bool {
		for _, one := range p.conns {
			if one.answered < one.sent {
				if err := p.collect(one, buf); err != nil {
					p.fail(err)
				}
			}
		}
		return int(p.accepted.Load()) >= sent
	}, p.failure)
}

// count counts what the broker accepts by data.
func (p *publishers) count(one *publisher, data []byte) error {
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
	one.answered += n
	p.accepted.Add(int64(n))
	return err
}

// prepare makes the frame that a connection sends, again and again.
func (p *publishers) prepare(one *publisher) {
	one.frame, one.bodies = p.d.frame(p.s.size, p.s.together, p.s.batch)
}

// publish writes the messages that were due at an instant.
func (p *publishers) publish(one *publisher, due mono.Time) error {
	for _, at := range one.bodies {
		binary.LittleEndian.PutUint64(one.frame[at:], uint64(due))
	}
	if p.d.number != nil {
		p.d.number(one.frame, one.bodies, one.seq)
		one.seq++
	}
	_, err := one.c.Write(one.frame)
	one.sent += p.s.together
	return err
}

// send sends at the scenario's rate for a time: messages on random connections,
// so that each connection's are at random times. It returns how many it sent.
// The frames of connections are small and many: they share one, but where the
// broker numbers them.
func (p *publishers) send(ctx context.Context, start mono.Time, lasting time.Duration, seed uint64) (sent int, err error) {
	var sender sync.WaitGroup
	sender.Go(func() { sent, err = p.sendNow(ctx, start, lasting, seed) })
	sender.Wait()
	return sent, err
}

func (p *publishers) sendNow(ctx context.Context, start mono.Time, lasting time.Duration, seed uint64) (sent int, err error) {
	if err := prompt(); err != nil {
		return 0, err
	}
	rng := rand.New(rand.NewPCG(seed, 0))
	frame, bodies := p.d.frame(p.s.size, p.s.together, p.s.batch)
	buf := make([]byte, answerSize)
	rest := time.Duration(0)
	if p.s.rate/float64(p.s.together) > crowded {
		rest = nap
	}
	now, end, due := start, start.Add(lasting), start
	for ctx.Err() == nil {
		due = due.Add(time.Duration(rng.ExpFloat64() / p.s.rate * float64(p.s.together) * 1e9))
		if !due.Before(end) {
			return sent, p.failure()
		}
		for now.Before(due) {
			if err := sleepUntil(max(due, now.Add(rest))); err != nil {
				return sent, err
			}
			now = clock.Mono()
		}
		one := p.conns[rng.IntN(len(p.conns))]
		one.frame, one.bodies = frame, bodies
		if one.sent-one.answered >= unread*p.s.together {
			if err := p.collect(one, buf); err != nil {
				return sent, err
			}
		}
		record(p.late, clock.Mono().Sub(due))
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
	p.reader.Go(func() {
		buf := make([]byte, answerSize)
		for !p.stopped.Load() {
			for _, one := range p.conns {
				if err := p.collect(one, buf); err != nil {
					p.fail(err)
					return
				}
			}
			time.Sleep(time.Millisecond)
		}
	})
	senders.Wait()
	p.stopped.Store(true)
	p.reader.Wait()
	return int(total.Load()), errors.Join(p.failure(), ctx.Err())
}
