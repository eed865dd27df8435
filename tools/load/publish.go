//go:build linux

package load

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

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/container"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/rawfd"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Publishers are the publishing connections of a scenario.
type Publishers struct {
	// set once
	s     Scenario
	d     Dialect
	conns []*publisher

	reader  sync.WaitGroup // reads replies during a flood and with Scenario.Acked
	stopped atomic.Bool    // tells the reader to end

	// owned by the sender until it ends: delays from the due time to the write
	late *obs.Latency

	// acked holds the delays from the due time to the reply; nil without Scenario.Acked. The
	// reader owns acked until Close. warm is set before the reader starts: messages due
	// earlier are not measured.
	acked *obs.Latency
	warm  mono.Time

	// atomic; written by the reader of replies
	accepted atomic.Int64

	mu  sync.Mutex
	err error // first failure; guarded by mu
}

// publisher is a publishing connection.
type publisher struct {
	c   net.Conn
	raw *socket // socket below c
	to  target

	mu     sync.Mutex                 // guards unread
	unread container.Queue[mono.Time] // due times of messages without a reply; only with Scenario.Acked

	// owned by the sender
	frame  []byte
	bodies []int
	seq    uint16
	sent   int       // messages
	after  mono.Time // end of the last write

	// Owned by the goroutine that reads replies: the reader during a flood and with
	// Scenario.Acked, else the sender. settle owns the fields after both have ended.
	answered int // messages
	rest     []byte
}

// A publisher sends unread frames before it reads replies. The broker
// writes each reply as usual, and a few hundred bytes wait in the socket. This process does
// not wake for each reply.
const (
	unread     = 8
	answerSize = 1 << 16 // bytes read at once
)

// Above crowded frames per second, the sender wakes at most once per nap, and sends all
// messages that are due. Latency still counts from the due time of each message. 40,000
// timers a second cost this process a fifth of its time, and delay the messages if the
// broker needs two processors.
const (
	crowded = 30_000
	nap     = 50 * time.Microsecond
)

func (p *Publishers) fail(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err == nil {
		p.err = err
	}
}

func (p *Publishers) failure() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// Connect opens the publishers of a scenario.
func Connect(address string, s Scenario, d Dialect) (*Publishers, error) {
	p := &Publishers{s: s, d: d, late: obs.NewLatency()}
	if s.Acked {
		p.acked = obs.NewLatency()
	}
	for i := range s.Conns {
		c, raw, err := dial(address, s.TLS, d)
		if err == nil {
			one := &publisher{c: c, raw: raw, to: target{s.topic(i), fmt.Sprint("p", i)}}
			p.conns = append(p.conns, one)
			err = errors.Join(d.hello(c, one.to.id), raw.dontWait())
		}
		if err != nil {
			p.Close()
			return nil, fmt.Errorf("publisher %d: %w", i, err)
		}
	}
	return p, nil
}

// stopReading waits for the end of the reader, if one runs.
func (p *Publishers) stopReading() {
	p.stopped.Store(true)
	p.reader.Wait()
}

// Close closes the connections and waits for the reader.
func (p *Publishers) Close() {
	p.stopReading()
	for _, one := range p.conns {
		_ = one.raw.Close() // without TLS close_notify, since the broker is about to stop
	}
}

// collect reads the available replies, if the protocol has replies.
func (p *Publishers) collect(one *publisher, buf []byte) error {
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

// settle reads the outstanding replies, for at most patience.
func (p *Publishers) settle(ctx context.Context, sent int) error {
	buf := make([]byte, answerSize)
	return until(ctx, clock.Mono().Add(patience), func() bool {
		for _, one := range p.conns {
			if p.acked == nil && one.answered < one.sent {
				if err := p.collect(one, buf); err != nil {
					p.fail(err)
				}
			}
		}
		return int(p.accepted.Load()) >= sent
	}, p.failure)
}

// count counts the messages that the replies in data accept.
func (p *Publishers) count(one *publisher, data []byte) error {
	perFrame := 1
	if p.s.Batch {
		perFrame = p.s.Together
	}
	if len(one.rest) > 0 {
		one.rest = append(one.rest, data...)
		data = one.rest
	}
	n, used, err := p.d.answers(data, perFrame)
	one.rest = append(one.rest[:0], data[used:]...)
	one.answered += n
	if p.acked != nil {
		now := clock.Mono()
		one.mu.Lock()
		for range min(n, one.unread.Len()) {
			if due := one.unread.Pop(); !due.Before(p.warm) {
				p.acked.Record(now.Sub(due))
			}
		}
		one.mu.Unlock()
	}
	p.accepted.Add(int64(n))
	return err
}

// prepare encodes the frame that a connection sends repeatedly.
func (p *Publishers) prepare(one *publisher) {
	one.frame, one.bodies = p.d.frame(one.to, p.s.Size, p.s.Together, p.s.Batch)
}

// publish writes the messages that are due at the given instant.
func (p *Publishers) publish(one *publisher, due, now mono.Time) error {
	all := p.s.Size >= AllTimes
	for _, at := range one.bodies {
		binary.LittleEndian.PutUint64(one.frame[at+TimeDue:], uint64(due))
		if all {
			binary.LittleEndian.PutUint64(one.frame[at+TimeBefore:], uint64(now))
			binary.LittleEndian.PutUint64(one.frame[at+TimeAfter:], uint64(one.after))
		}
	}
	if p.d.number != nil {
		p.d.number(one.frame, one.bodies, one.seq)
		one.seq++
	}
	if p.acked != nil {
		one.mu.Lock()
		for range p.s.Together {
			one.unread.Push(due)
		}
		one.mu.Unlock()
	}
	_, err := one.c.Write(one.frame)
	one.after = clock.Mono()
	one.sent += p.s.Together
	return err
}

// Send sends at the scenario's rate for a time, and returns the number of messages. Send
// picks a random connection for each frame, so the messages of each connection also have
// random times. The connections of a topic share one frame, in place of many small frames.
func (p *Publishers) Send(ctx context.Context, start mono.Time, lasting time.Duration, seed uint64) (sent int, err error) {
	var sender sync.WaitGroup
	sender.Go(func() { sent, err = p.sendNow(ctx, start, lasting, seed) })
	sender.Wait()
	return sent, err
}

func (p *Publishers) sendNow(ctx context.Context, start mono.Time, lasting time.Duration, seed uint64) (sent int, err error) {
	if err := prompt(); err != nil {
		return 0, err
	}
	rng := rand.New(rand.NewPCG(seed, 0))
	for i, one := range p.conns {
		if first := p.conns[i%max(1, p.s.Topics)]; first == one || p.d.personal {
			p.prepare(one)
		} else {
			one.frame, one.bodies = first.frame, first.bodies
		}
	}
	buf := make([]byte, answerSize)
	if p.acked != nil {
		p.warm = start.Add(Warming)
		p.reader.Go(func() {
			if err := p.readAtOnce(); err != nil {
				p.fail(err)
			}
		})
	}
	rest := time.Duration(0)
	if p.s.Rate/float64(p.s.Together) > crowded {
		rest = nap
	}
	now, end, due := start, start.Add(lasting), start
	var contract tokenbucket.Bucket
	if p.s.Burst > 0 {
		contract = tokenbucket.New(Contract(p.s.Rate, p.s.Burst), start)
	}
	for ctx.Err() == nil {
		due = due.Add(time.Duration(rng.ExpFloat64() / p.s.Rate * float64(p.s.Together) * 1e9))
		if !due.Before(end) {
			return sent, p.failure()
		}
		at := due
		if p.s.Burst > 0 {
			at = max(at, contract.Eligible(clock.Mono()))
		}
		for now.Before(at) {
			if err := sleepUntil(max(at, now.Add(rest))); err != nil {
				return sent, err
			}
			now = clock.Mono()
		}
		one := p.conns[rng.IntN(len(p.conns))]
		if p.acked == nil && one.sent-one.answered >= unread*p.s.Together {
			if err := p.collect(one, buf); err != nil {
				return sent, err
			}
		}
		before := clock.Mono()
		p.late.Record(before.Sub(due))
		if p.s.Burst > 0 {
			contract.Take(before)
		}
		if err := p.publish(one, due, before); err != nil {
			return sent, errors.Join(err, p.failure())
		}
		sent += p.s.Together
	}
	return sent, ctx.Err()
}

// readAtOnce reads each reply when the reply arrives, until Close.
func (p *Publishers) readAtOnce() error {
	if err := prompt(); err != nil {
		return err
	}
	poller, err := rawfd.NewPoller()
	if err != nil {
		return err
	}
	defer poller.Close()
	for i, one := range p.conns {
		if err := poller.Watch(one.raw.fd, int32(i), 0, 0, unix.EPOLLIN); err != nil {
			return err
		}
	}
	buf := make([]byte, answerSize)
	for !p.stopped.Load() {
		poller.Alarm(clock.Mono().Add(attention))
		for _, e := range poller.Wait(true) {
			if err := p.collect(p.conns[e.Fd], buf); err != nil {
				return err
			}
		}
	}
	return nil
}

// converse makes each publisher send the next frame after the reply to the previous frame,
// or while fewer than Scenario.Ahead messages have no reply.
func (p *Publishers) converse(ctx context.Context, lasting time.Duration) (sent int, err error) {
	var sender sync.WaitGroup
	sender.Go(func() { sent, err = p.converseNow(ctx, lasting) })
	sender.Wait()
	return sent, err
}

func (p *Publishers) converseNow(ctx context.Context, lasting time.Duration) (sent int, err error) {
	if err := prompt(); err != nil {
		return 0, err
	}
	poller, err := rawfd.NewPoller()
	if err != nil {
		return 0, err
	}
	defer poller.Close()
	buf := make([]byte, answerSize)
	now := clock.Mono()
	end := now.Add(lasting)
	poller.Alarm(end)
	ahead := max(p.s.Ahead, p.s.Together)
	fill := func(one *publisher) error {
		for now = clock.Mono(); one.sent-one.answered+p.s.Together <= ahead; sent += p.s.Together {
			if err := p.publish(one, now, now); err != nil {
				return err
			}
		}
		return nil
	}
	for i, one := range p.conns {
		p.prepare(one)
		if err := errors.Join(poller.Watch(one.raw.fd, int32(i), 0, 0, unix.EPOLLIN), fill(one)); err != nil {
			return sent, err
		}
	}
	for now.Before(end) && ctx.Err() == nil {
		for _, e := range poller.Wait(true) {
			one := p.conns[e.Fd]
			if err := errors.Join(p.collect(one, buf), fill(one)); err != nil {
				return sent, err
			}
		}
		now = clock.Mono()
	}
	return sent, ctx.Err()
}

// flood sends as fast as the broker reads, up to the scenario's limit, or for lasting.
func (p *Publishers) flood(ctx context.Context, lasting time.Duration) (sent int, err error) {
	var total atomic.Int64
	var senders sync.WaitGroup
	end := clock.Mono().Add(lasting)
	for _, one := range p.conns {
		p.prepare(one)
		senders.Go(func() {
			for ctx.Err() == nil && p.failure() == nil {
				now := clock.Mono()
				if !now.Before(end) {
					return
				}
				if total.Add(int64(p.s.Together)) > int64(p.s.Limit) && p.s.Limit > 0 {
					total.Add(-int64(p.s.Together))
					return
				}
				if err := p.publish(one, now, now); err != nil {
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
	p.stopReading()
	return int(total.Load()), errors.Join(p.failure(), ctx.Err())
}
