// Package greedy emulates publishers that send as much as their broker allows. Each
// publisher has one message in flight, and sends the next message as soon as the broker's
// pacing permits.
package greedy

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/frames"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/pacing/header"
	"github.com/srtm-io/srtm/pacing/sender"
	"github.com/srtm-io/srtm/tools/iotpub/payload"
)

// Publisher is one publisher with one connection. The exported fields, except the counters,
// are set before Run.
type Publisher struct {
	ID     string
	Weight uint8   // requested weight; 0: no PACE, like a stock producer
	Greedy bool    // requests the pace but ignores it
	Demand float64 // offered msg/s; 0: unlimited
	Number uint32  // source number in the messages

	Accepted, Refused atomic.Int64 // messages
}

// retry is the wait after a refusal, and before reconnecting.
const retry = 100 * time.Millisecond

// Run publishes to the broker that where returns, and reconnects after failures, until ctx
// ends. Run returns an error only if where fails.
func (p *Publisher) Run(ctx context.Context, topic string, size int, lookup func(context.Context) (address string, err error)) error {
	for {
		address, err := lookup(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("publisher %s: %w", p.ID, err)
		}
		_ = p.publish(ctx, address, topic, size) // counted, and retried below
		if !clock.Sleep(ctx, retry) {
			return nil
		}
	}
}

// publish sends one message at a time. If size permits, the message carries its due time.
// Late messages follow immediately, up to one second's worth.
func (p *Publisher) publish(ctx context.Context, address, topic string, size int) error {
	c, err := Dial(ctx, address, p.ID)
	if err != nil {
		return err
	}
	defer c.Close()
	if p.Weight > 0 {
		if _, err := c.Write(wire.AppendPace(nil, p.Weight)); err != nil {
			return err
		}
		if kind, data, err := c.Frame(); err != nil || kind == wire.FrameError {
			return fmt.Errorf("request a pace: %s, %w", data, err)
		}
	}
	var bucket sender.Bucket
	var gap time.Duration
	if p.Demand > 0 {
		gap = time.Duration(float64(time.Second) / p.Demand)
	}
	pub := wire.AppendPub(nil, topic, make([]byte, size))
	for due := clock.Mono(); ctx.Err() == nil; {
		now := clock.Mono()
		due = max(due, now.Add(-time.Second))
		wait := due.Sub(now)
		if wait <= 0 && p.Weight > 0 && !p.Greedy {
			wait = bucket.Wait(1, now)
		}
		if wait > 0 {
			clock.Sleep(ctx, wait)
			continue
		}
		intended := due
		if due = due.Add(gap); gap == 0 {
			due = now
		}
		if size >= payload.Size {
			payload.Append(pub[:len(pub)-size], payload.Payload{Source: p.Number, Intended: intended}, size) // written in place
		}
		if _, err := c.Write(pub); err != nil {
			return err
		}
		kind, data, err := c.Frame()
		if err != nil {
			return err
		}
		if kind == wire.FrameError {
			if p.Refused.Add(1); !p.Greedy && p.Weight > 0 || gap == 0 {
				clock.Sleep(ctx, retry)
			}
			continue
		}
		p.Accepted.Add(1)
		p.applyAdvice(&bucket, data, clock.Mono())
	}
	return nil
}

func (p *Publisher) applyAdvice(b *sender.Bucket, data []byte, now mono.Time) {
	if ok, err := header.ParseOK(data); err == nil {
		b.Advise(sender.Advice{Paced: ok.Paced, Overload: ok.Overload, Rate: ok.Rate, Burst: ok.Burst, Interval: ok.Interval}, now)
	}
}

// Conn is a connection to a broker.
type Conn struct {
	net.Conn
	in *bufio.Reader
}

// Dial connects as id. The connection closes when ctx ends.
func Dial(ctx context.Context, address, id string) (*Conn, error) {
	nc, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	context.AfterFunc(ctx, func() { nc.Close() })
	c := &Conn{nc, bufio.NewReader(nc)}
	hello := wire.AppendIdentify(wire.AppendMagic(nil), []byte(`{"client_id":`+strconv.Quote(id)+`}`))
	if _, err := c.Write(hello); err != nil {
		return nil, err
	}
	_, _, err = c.Frame()
	return c, err
}

// maxFrame bounds a broker's frame.
const maxFrame = 64 << 20

// Frame returns the next frame, and answers heartbeats.
func (c *Conn) Frame() (wire.FrameType, []byte, error) {
	for {
		kind, data, err := frames.Read(c.in, maxFrame)
		if err != nil || string(data) != wire.Heartbeat {
			return kind, data, err
		}
		if _, err := c.Write(wire.AppendNop(nil)); err != nil {
			return 0, nil, err
		}
	}
}

// Consume finishes a channel's messages until ctx or the connection ends. got, which may be
// nil, receives the payloads.
func Consume(ctx context.Context, address, topic, channel string, got func(payload.Payload)) {
	c, err := Dial(ctx, address, "consumer")
	if err != nil {
		return
	}
	defer c.Close()
	if _, err := c.Write(wire.AppendRdy(wire.AppendSub(nil, topic, channel), 2500)); err != nil {
		return
	}
	for {
		kind, data, err := c.Frame()
		if err != nil {
			return
		}
		if kind != wire.FrameMessage {
			continue
		}
		if m, err := wire.ParseMessage(data); err == nil {
			if p, ok := payload.Parse(m.Body); ok && got != nil {
				got(p)
			}
			if _, err := c.Write(wire.AppendFin(nil, m.ID)); err != nil {
				return
			}
		}
	}
}
