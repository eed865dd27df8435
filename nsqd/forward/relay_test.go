package forward

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/queue"
)

// relayed returns a subscription to two brokers. The commands to the brokers are not written.
func relayed(t *testing.T) (s *Subscription, a, b *source) {
	t.Helper()
	f := testkit.Result(New(Config{LoadDistributor: "127.0.0.1:1", MaxConnections: 10, MaxBytes: 1 << 20, Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry()})).Must(t)
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		testkit.NoError(t, f.Run(ctx))
	})
	s = &Subscription{forwarder: f, subscriber: Subscriber{MsgTimeout: time.Minute}, notify: func() {}, changed: make(chan struct{}, 1), outcome: make(chan error, 1), stop: func() {}}
	s.mu.inFlight = map[wire.MessageID]*inFlightMessage{}
	a = &source{address: "a", conn: &client.Conn{}, hasCommands: make(chan struct{}, 1)}
	b = &source{address: "b", conn: &client.Conn{}, hasCommands: make(chan struct{}, 1)}
	s.add(b)
	s.add(a)
	return s, a, b
}

// taken returns the messages that the relay writes to the consumer.
func taken(t *testing.T, s *Subscription, most int) (ids []wire.MessageID) {
	t.Helper()
	var out broker.Outgoing
	testkit.MustEqual(t, s.Take(&out, most), true)
	for rest := out.Frames; len(rest) > 0; {
		kind, data, n, err := wire.ParseFrame(rest, 1<<20)
		testkit.Must(t, err)
		testkit.MustEqual(t, kind, wire.FrameMessage)
		ids = append(ids, testkit.Result(wire.ParseMessage(data)).Must(t).ID)
		rest = rest[n:]
	}
	return ids
}

var one = wire.MessageID([]byte("0123456789abcdef"))

// The relay returns two messages with the same id each to the broker that sent the message.
func TestMessagesOfOneIDAreToldApart(t *testing.T) {
	s, a, b := relayed(t)
	testkit.NoError(t, s.Ready(4))
	testkit.Equal(t, a.credit+b.credit, 4)
	s.deliver(a, wire.Message{ID: one, Body: []byte("of a")}, nil)
	s.deliver(b, wire.Message{ID: one, Body: []byte("of b")}, nil)
	ids := taken(t, s, 1<<10)
	testkit.MustEqual(t, len(ids), 2)
	testkit.Equal(t, ids[0], one)
	testkit.Equal(t, ids[1] != one, true, "the second message has another id")
	testkit.NoError(t, s.Touch(ids[1]))
	testkit.NoError(t, s.Requeue(ids[1], time.Second))
	testkit.NoError(t, s.FinishBatch(clock.Mono(), ids[:1], nil)[0])
	testkit.Equal(t, string(a.commands), "FIN "+one.String()+"\n")
	testkit.Equal(t, string(b.commands), "TOUCH "+one.String()+"\nREQ "+one.String()+" 1000\n")
	for _, id := range ids {
		testkit.Equal(t, errors.Is(s.Touch(id), queue.ErrNotInFlight), true, "a message that was answered")
	}
	_, held := s.Holds()
	testkit.Equal(t, held, 0)
}

// A message that timed out comes again with its id. Messages that a consumer never answers release their memory and
// credit in the end.
func TestTimedOutMessages(t *testing.T) {
	s, a, b := relayed(t)
	testkit.NoError(t, s.Ready(1))
	s.deliver(a, wire.Message{ID: one}, nil)
	s.deliver(a, wire.Message{ID: one, Attempts: 2}, nil)
	_, held := s.Holds()
	testkit.Equal(t, held, 1)
	for range 2 * maxStay {
		s.pass()
	}
	testkit.Equal(t, a.credit+b.credit <= 1, true)
	late := clock.Mono().Add(time.Minute + expiryMargin)
	s.step(func() { s.expireLocked(late) })
	_, held = s.Holds()
	testkit.Equal(t, held, 0)
	testkit.Equal(t, a.credit+b.credit, 1)
}

// If a broker is lost, its messages are lost, and the other broker gets its part of RDY.
func TestLostBrokerGivesItsReadyToOthers(t *testing.T) {
	s, a, b := relayed(t)
	testkit.NoError(t, s.Ready(5))
	s.deliver(a, wire.Message{ID: one}, nil)
	s.remove(a)
	testkit.Equal(t, b.credit, 5)
	testkit.Equal(t, errors.Is(s.FinishBatch(clock.Mono(), []wire.MessageID{one}, nil)[0], queue.ErrNotInFlight), true)
	testkit.MustEqual(t, len(taken(t, s, 1<<10)), 1)
}

// The queues to a consumer and to a broker are bounded.
func TestBoundsOfARelay(t *testing.T) {
	s, a, _ := relayed(t)
	testkit.Equal(t, s.roomFor(10*maxWaiting) == nil, true, "a consumer for which nothing waits has room")
	s.deliver(a, wire.Message{ID: one, Body: make([]byte, maxWaiting/2)}, nil)
	room := s.roomFor(maxWaiting)
	testkit.MustEqual(t, room != nil, true)
	testkit.NoError(t, s.Touch(one))
	for range maxCommands {
		if s.Touch(one) != nil {
			break
		}
	}
	testkit.Equal(t, len(a.commands) <= maxCommands+64, true, "commands of a consumer that floods")
	taken(t, s, 1)
	select {
	case <-room:
	default:
		t.Error("no room after the consumer has read")
	}
	testkit.Equal(t, s.forwarder.waitingBytes.Load(), 0)
	s.deliver(a, wire.Message{ID: one, Body: make([]byte, 100)}, nil)
	s.Close()
	testkit.Equal(t, s.forwarder.waitingBytes.Load(), 0, "after the end")
	testkit.Equal(t, errors.Is(s.Touch(one), queue.ErrNotInFlight), true)
}

// A relay of the other brokers waits for all other brokers, until the time is over. The relay reports a part on the
// consumer's broker.
func TestRelayOfTheOtherBrokers(t *testing.T) {
	s, _, _ := relayed(t)
	notified := 0
	s.notify = func() { notified++ }
	s.forwarder.SetBroker("b1", "here")
	s.subscriber.Others = &Others{Here: true, Until: mono.Never}
	s.outcome = make(chan error, 1)
	s.mu.dialled = map[string]bool{"a": true, "b": true, "c": true} // no goroutine dials
	settled := func() bool {
		select {
		case err := <-s.outcome:
			testkit.NoError(t, err)
			return true
		default:
			return false
		}
	}
	s.follow(t.Context(), nil, nil)
	testkit.Equal(t, settled(), false, "before a lookup")
	s.follow(t.Context(), nil, []string{"a", "b", "c", "here"})
	testkit.Equal(t, settled(), false, "c has not accepted")
	testkit.Equal(t, s.Here(), true)
	testkit.Equal(t, notified, 1)
	s.follow(t.Context(), nil, []string{"a", "b", "here"})
	testkit.Equal(t, settled(), true)
	testkit.Equal(t, notified, 1)
	s.follow(t.Context(), nil, []string{"a", "b"})
	testkit.Equal(t, s.Here(), false)
	testkit.Equal(t, notified, 2)

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s.subscriber.Others = &Others{Here: true}
	testkit.NoError(t, s.await(t.Context()), "after the time")
	s.subscriber.Others = nil
	settled()
	testkit.Equal(t, s.await(ctx) != nil, true)
}
