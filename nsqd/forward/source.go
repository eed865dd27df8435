package forward

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	"github.com/nsqio/go-nsq"

	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/container"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/nsq/wire"
)

const (
	// maxCommands is the maximum size of the FIN, REQ and TOUCH commands that wait for a broker, in
	// bytes.
	maxCommands = 64 << 10
	// redialFirst and redialLast limit the wait before a reconnect.
	redialFirst, redialLast = 50 * time.Millisecond, 2 * time.Second
	// keepAliveInterval is the interval of NOPs to a broker while this broker reads nothing from it.
	keepAliveInterval = 2 * time.Second
)

// source is a connection to a broker whose messages are relayed to a consumer.
type source struct {
	// Set once.
	address     string
	conn        *client.Conn
	hasCommands chan struct{} // capacity 1: there is something to write

	// Guarded by Subscription.mu.
	credit, sentReady int    // RDY of this broker; the last RDY sent
	commands          []byte // to write
	held              int    // messages that the consumer holds
	received          int    // messages since the last pass
	inFlight          container.List[*inFlightMessage]
}

// inFlightMessage is a message that the consumer holds. Guarded by Subscription.mu.
type inFlightMessage struct {
	source        *source
	local, remote wire.MessageID // the id for the consumer and the id for the broker
	expires       mono.Time
	element       container.Element[*inFlightMessage]
}

// connect starts a goroutine that subscribes at a broker, unless there is one already.
func (s *Subscription) connect(ctx context.Context, brokers *topic, address string) {
	s.mu.Lock()
	exists := s.mu.dialled[address]
	s.mu.dialled[address] = true
	s.mu.Unlock()
	if exists {
		return
	}
	s.all.Go(func() {
		for wait := redialFirst; ; wait = min(2*wait, redialLast) {
			start := clock.Mono()
			err := s.serve(ctx, address)
			if ctx.Err() != nil {
				return
			}
			s.recordFailure(err)
			s.forwarder.log.Info("a relayed subscription has lost a broker; retrying while the broker has the topic",
				obs.KeyTopic, s.topic, obs.KeyAddress, address, obs.KeyError, err)
			if clock.Mono().Sub(start) > redialLast {
				wait = redialFirst
			}
			if !clock.Sleep(ctx, wait/2+rand.N(wait/2)) {
				return
			}
			if !brokers.has(address) {
				s.mu.Lock()
				delete(s.mu.dialled, address)
				s.mu.Unlock()
				wake(s.changed)
				return
			}
		}
	})
}

var errTooManySources = errors.New("the limit of connections to other brokers is reached, see --max-connections")

// serve subscribes at a broker and relays messages until the connection ends. It returns the reason
// for the end.
func (s *Subscription) serve(ctx context.Context, address string) error {
	if s.forwarder.sources.Add(1) > s.forwarder.maxSources {
		s.forwarder.sources.Add(-1)
		return errTooManySources
	}
	defer s.forwarder.sources.Add(-1)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	conn, err := client.Dial(ctx, address, s.model())
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer conn.Close()
	if err := conn.Subscribe(s.topic, s.channel, 0); err != nil {
		return fmt.Errorf("subscribe: %w", err)
	}
	src := &source{address: address, conn: conn, hasCommands: make(chan struct{}, 1)}
	s.add(src)
	defer s.remove(src)
	var writer sync.WaitGroup
	defer writer.Wait()
	defer cancel()
	writer.Go(func() {
		if s.write(ctx, src) != nil {
			cancel() // ends the connection
		}
	})
	return s.read(ctx, src)
}

func (s *Subscription) read(ctx context.Context, src *source) error {
	for {
		kind, data, err := src.conn.Next()
		if err != nil {
			return err
		}
		switch kind {
		case wire.FrameMessage:
			m, attribute, err := s.parse(data)
			if err == nil {
				err = s.waitForRoom(ctx, src, len(data))
			}
			if err != nil {
				return err
			}
			s.deliver(src, m, attribute)
		case wire.FrameError:
			code, text, _ := bytes.Cut(data, []byte(" "))
			refusal := wire.NewError(wire.ErrorCode(code), string(text))
			switch refusal.Code {
			case wire.CodeFinFailed, wire.CodeReqFailed, wire.CodeTouchFailed:
				s.queueRefusal(refusal)
			default:
				return refusal
			}
		}
	}
}

// parse parses a message, with its attribute if the subscriber has Attributes.
func (s *Subscription) parse(data []byte) (m wire.Message, attribute []byte, err error) {
	m, err = wire.ParseMessage(data)
	if err != nil || !s.subscriber.Attributes {
		return m, nil, err
	}
	attribute, payload, ok := wire.CutAttribute(m.Body)
	if !ok {
		return m, nil, fmt.Errorf("%w: a body of %d bytes is shorter than its attribute", wire.ErrMessage, len(m.Body))
	}
	m.Body = payload
	return m, attribute, nil
}

// waitForRoom waits until there is room for the consumer's next message. Meanwhile it sends NOPs to
// keep the connection alive. The broker sends as much as its socket accepts.
func (s *Subscription) waitForRoom(ctx context.Context, src *source, size int) error {
	room := s.roomFor(size)
	if room == nil {
		return nil
	}
	keepAlive := time.NewTicker(keepAliveInterval)
	defer keepAlive.Stop()
	for ; room != nil; room = s.roomFor(size) {
		select {
		case <-room:
		case <-keepAlive.C:
			if err := src.conn.Send(nsq.Nop()); err != nil {
				return err
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// write sends a broker its part of RDY and the consumer's commands.
func (s *Subscription) write(ctx context.Context, src *source) error {
	for {
		select {
		case <-src.hasCommands:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		s.mu.Lock()
		commands := src.commands
		src.commands = nil
		if src.credit != src.sentReady {
			commands = wire.AppendRdy(commands, src.credit)
			src.sentReady = src.credit
		}
		s.mu.Unlock()
		if len(commands) > 0 {
			if err := src.conn.Send(&net.Buffers{commands}); err != nil {
				return err
			}
		}
	}
}
