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
	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/mono"
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
	stopped atomic.Bool    // ends the reader

	// owned by the sender until it ends: delays from the due time to the write
	late *histogram.Latency

	// acked holds the delays from the due time to the reply; nil without Scenario.Acked. The
	// reader owns acked until Close. warm is set before the reader starts: messages due
	// earlier are not measured.
	acked *histogram.Latency
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
	answered int    // messages
	partial  []byte // start of an incomplete reply
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
	p := &Publishers{s: s, d: d, late: histogram.NewLatency()}
	if s.Acked {
		p.acked = histogram.NewLatency()
	}
	for i := range s.Conns {
		c, raw, err := dial(address, s.TLS, d)
		if err == nil {
			pub := &publisher{c: c, raw: raw, to: target{s.topic(i), fmt.Sprint("p", i)}}
			p.conns = append(p.conns, pub)
			err = errors.Join(d.hello(c, pub.to.id), raw.setNonblocking())
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
	for _, pub := range p.conns {
		_ = pub.raw.Close() // without TLS close_notify, since the broker is about to stop
	}
}

// collect reads the available replies, if the protocol has replies.
func (p *Publishers) collect(pub *publisher, buf []byte) error {
	if p.d.answers == nil {
		return nil
	}
	n, err := pub.c.Read(buf)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("publisher: %w", err)
	}
	return p.count(pub, buf[:n])
}

// settle reads the outstanding replies, for at most patience.
func (p *Publishers) settle(ctx context.Context, sent int) error {
	buf := make([]byte, answerSize)
	return until(ctx, clock.Mono().Add(patience), func() bool {
		for _, pub := range p.conns {
			if p.acked == nil && pub.answered < pub.sent {
				if err := p.collect(pub, buf); err != nil {
					p.fail(err)
				}
			}
		}
		return int(p.accepted.Load()) >= sent
	}, p.failure)
}

// count counts the messages that the replies in data accept.
func (p *Publishers) count(pub *publisher, data []byte) error {
	perFrame := 1
	if p.s.Batch {
		perFrame = p.s.Together
	}
	if len(pub.partial) > 0 {
		pub.partial = append(pub.partial, data...)
		data = pub.partial
	}
	n, used, err := p.d.answers(data, perFrame)
	pub.partial = append(pub.partial[:0], data[used:]...)
	pub.answered += n
	if p.acked != nil {
		now := clock.Mono()
		pub.mu.Lock()
		for range min(n, pub.unread.Len()) {
			if due := pub.unread.Pop(); !due.Before(p.warm) {
				p.acked.Record(now.Sub(due))
			}
		}
		pub.mu.Unlock()
	}
	p.accepted.Add(int64(n))
	return err
}

// prepare encodes the frame that a connection sends repeatedly.
func (p *Publishers) prepare(pub *publisher) {
	pub.frame, pub.bodies = p.d.frame(pub.to, p.s.Size, p.s.Together, p.s.Batch)
}

// publish writes the messages that are due at the given instant.
func (p *Publishers) publish(pub *publisher, due, now mono.Time) error {
	all := p.s.Size >= AllTimes
	for _, offset := range pub.bodies {
		binary.LittleEndian.PutUint64(pub.frame[offset+TimeDue:], uint64(due))
		if all {
			binary.LittleEndian.PutUint64(pub.frame[offset+TimeBefore:], uint64(now))
			binary.LittleEndian.PutUint64(pub.frame[offset+TimeAfter:], uint64(pub.after))
		}
	}
	if p.d.number != nil {
		p.d.number(pub.frame, pub.bodies, pub.seq)
		pub.seq++
	}
	if p.acked != nil {
		pub.mu.Lock()
		for range p.s.Together {
			pub.unread.Push(due)
		}
		pub.mu.Unlock()
	}
	_, err := pub.c.Write(pub.frame)
	pub.after = clock.Mono()
	pub.sent += p.s.Together
	return err
}

// Send sends at the scenario's rate for a time, and returns the number of messages. Send
// picks a random connection for each frame, so the messages of each connection also have
// random times. The connections of a topic share one frame, in place of many small frames.
func (p *Publishers) Send(ctx context.Context, start mono.Time, lasting time.Duration, seed uint64) (sent int, err error) {
	var sender sync.WaitGroup
	sender.Go(func() { sent, err = p.sendOnThread(ctx, start, lasting, seed) })
	sender.Wait()
	return sent, err
}

func (p *Publishers) sendOnThread(ctx context.Context, start mono.Time, lasting time.Duration, seed uint64) (sent int, err error) {
	if err := lockUrgentThread(); err != nil {
		return 0, err
	}
	rng := rand.New(rand.NewPCG(seed, 0))
	for i, pub := range p.conns {
		if first := p.conns[i%max(1, p.s.Topics)]; first == pub || p.d.personal {
			p.prepare(pub)
		} else {
			pub.frame, pub.bodies = first.frame, first.bodies
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
	pause := time.Duration(0)
	if p.s.Rate/float64(p.s.Together) > crowded {
		pause = nap
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
		allowed := due
		if p.s.Burst > 0 {
			allowed = max(allowed, contract.Eligible(clock.Mono()))
		}
		for now.Before(allowed) {
			if err := sleepUntil(max(allowed, now.Add(pause))); err != nil {
				return sent, err
			}
			now = clock.Mono()
		}
		pub := p.conns[rng.IntN(len(p.conns))]
		if p.acked == nil && pub.sent-pub.answered >= unread*p.s.Together {
			if err := p.collect(pub, buf); err != nil {
				return sent, err
			}
		}
		before := clock.Mono()
		p.late.Record(before.Sub(due))
		if p.s.Burst > 0 {
			contract.Take(before)
		}
		if err := p.publish(pub, due, before); err != nil {
			return sent, errors.Join(err, p.failure())
		}
		sent += p.s.Together
	}
	return sent, ctx.Err()
}

// readAtOnce reads each reply when the reply arrives, until Close.
func (p *Publishers) readAtOnce() error {
	if err := lockUrgentThread(); err != nil {
		return err
	}
	poller, err := rawfd.NewPoller()
	if err != nil {
		return err
	}
	defer poller.Close()
	for i, pub := range p.conns {
		if err := poller.Watch(pub.raw.fd, int32(i), 0, 0, unix.EPOLLIN); err != nil {
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
	sender.Go(func() { sent, err = p.converseOnThread(ctx, lasting) })
	sender.Wait()
	return sent, err
}

func (p *Publishers) converseOnThread(ctx context.Context, lasting time.Duration) (sent int, err error) {
	if err := lockUrgentThread(); err != nil {
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
	fill := func(pub *publisher) error {
		for now = clock.Mono(); pub.sent-pub.answered+p.s.Together <= ahead; sent += p.s.Together {
			if err := p.publish(pub, now, now); err != nil {
				return err
			}
		}
		return nil
	}
	for i, pub := range p.conns {
		p.prepare(pub)
		if err := errors.Join(poller.Watch(pub.raw.fd, int32(i), 0, 0, unix.EPOLLIN), fill(pub)); err != nil {
			return sent, err
		}
	}
	for now.Before(end) && ctx.Err() == nil {
		for _, e := range poller.Wait(true) {
			pub := p.conns[e.Fd]
			if err := errors.Join(p.collect(pub, buf), fill(pub)); err != nil {
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
	for _, pub := range p.conns {
		p.prepare(pub)
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
				if err := p.publish(pub, now, now); err != nil {
					p.fail(err)
					return
				}
			}
		})
	}
	p.reader.Go(func() {
		buf := make([]byte, answerSize)
		for !p.stopped.Load() {
			for _, pub := range p.conns {
				if err := p.collect(pub, buf); err != nil {
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
