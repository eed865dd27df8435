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
	"github.com/srtm-io/srtm/internal/list"
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
	// stillHere is the interval of NOPs to a broker while this broker reads nothing from it.
	stillHere = 2 * time.Second
)

// source is a connection to a broker whose messages are relayed to a consumer.
type source struct {
	// Set once.
	address string
	conn    *client.Conn
	busy    chan struct{} // capacity 1: there is something to write

	// Guarded by Subscription.mu.
	part, said int    // RDY of this broker; the last RDY sent
	commands   []byte // to write
	held       int    // messages that the consumer holds
	came       int    // messages since the last pass
	flights    list.List[*flight]
}

// flight is a message that the consumer holds. Guarded by Subscription.mu.
type flight struct {
	of            *source
	local, remote wire.MessageID // the id for the consumer and the id for the broker
	expires       mono.Time
	place         list.Element[*flight]
}

// connect starts a goroutine that subscribes at a broker, unless there is one already.
func (s *Subscription) connect(ctx context.Context, at *topic, address string) {
	s.mu.Lock()
	known := s.mu.dialled[address]
	s.mu.dialled[address] = true
	s.mu.Unlock()
	if known {
		return
	}
	s.all.Go(func() {
		for wait := redialFirst; ; wait = min(2*wait, redialLast) {
			began := clock.Mono()
			err := s.serve(ctx, address)
			if ctx.Err() != nil {
				return
			}
			s.failed(err)
			s.of.log.Info("a relayed subscription has lost a broker; retrying while the broker has the topic",
				obs.KeyTopic, s.topic, obs.KeyAddress, address, obs.KeyError, err)
			if clock.Mono().Sub(began) > redialLast {
				wait = redialFirst
			}
			if !clock.Sleep(ctx, wait/2+rand.N(wait/2)) {
				return
			}
			if !at.has(address) {
				s.mu.Lock()
				delete(s.mu.dialled, address)
				s.mu.Unlock()
				wake(s.changed)
				return
			}
		}
	})
}

var errMany = errors.New("there are as many connections to other brokers as there may be: see --max-connections")

// serve subscribes at a broker and relays messages until the connection ends. It returns the reason
// for the end.
func (s *Subscription) serve(ctx context.Context, address string) error {
	if s.of.sources.Add(1) > s.of.maxSources {
		s.of.sources.Add(-1)
		return errMany
	}
	defer s.of.sources.Add(-1)
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
	one := &source{address: address, conn: conn, busy: make(chan struct{}, 1)}
	s.add(one)
	defer s.remove(one)
	var writer sync.WaitGroup
	defer writer.Wait()
	defer cancel()
	writer.Go(func() {
		if s.write(ctx, one) != nil {
			cancel() // ends the connection
		}
	})
	return s.read(ctx, one)
}

func (s *Subscription) read(ctx context.Context, one *source) error {
	for {
		kind, data, err := one.conn.Next()
		if err != nil {
			return err
		}
		switch kind {
		case wire.FrameMessage:
			m, err := wire.ParseMessage(data)
			if err == nil {
				err = s.waitForRoom(ctx, one, len(data))
			}
			if err != nil {
				return err
			}
			s.took(one, m)
		case wire.FrameError:
			code, text, _ := bytes.Cut(data, []byte(" "))
			refusal := wire.NewError(wire.ErrorCode(code), string(text))
			switch refusal.Code {
			case wire.CodeFinFailed, wire.CodeReqFailed, wire.CodeTouchFailed:
				s.refused(refusal)
			default:
				return refusal
			}
		}
	}
}

// waitForRoom waits until there is room for the consumer's next message. Meanwhile it sends NOPs to
// keep the connection alive. The broker sends as much as its socket accepts.
func (s *Subscription) waitForRoom(ctx context.Context, one *source, size int) error {
	room := s.full(size)
	if room == nil {
		return nil
	}
	alive := time.NewTicker(stillHere)
	defer alive.Stop()
	for ; room != nil; room = s.full(size) {
		select {
		case <-room:
		case <-alive.C:
			if err := one.conn.Send(nsq.Nop()); err != nil {
				return err
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// write sends a broker its part of RDY and the consumer's commands.
func (s *Subscription) write(ctx context.Context, one *source) error {
	for {
		select {
		case <-one.busy:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		s.mu.Lock()
		commands := one.commands
		one.commands = nil
		if one.part != one.said {
			commands = wire.AppendRdy(commands, one.part)
			one.said = one.part
		}
		s.mu.Unlock()
		if len(commands) > 0 {
			if err := one.conn.Send(&net.Buffers{commands}); err != nil {
				return err
			}
		}
	}
}
