package forward

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/nsqio/go-nsq"

	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/queue"
)

const (
	// maxWaiting is how many bytes of messages wait for one consumer, unless a single message
	// is larger. What has no room stays with its broker.
	maxWaiting = 256 << 10
	// passEvery is how long a broker without messages keeps the only credit.
	passEvery = 250 * time.Millisecond
	// expiresAfter is how much longer than its broker a relay knows a message that timed out.
	expiresAfter = time.Second
)

// Subscriber is a consumer that is connected to this broker.
type Subscriber struct {
	Publisher  // who it is
	Hostname   string
	MsgTimeout time.Duration
	SampleRate int
}

// Subscription relays the messages of a topic's brokers to one consumer. It has a connection to
// each broker (source). Its methods are those of broker.Subscription, and do not wait either.
type Subscription struct {
	// Set once.
	of             *Forwarder
	topic, channel string
	about          Subscriber
	origin         string
	notify         func()
	stop           context.CancelFunc
	changed        chan struct{} // 1 deep: ready or sources changed
	outcome        chan error    // 1 deep: what became of the first SUB that a broker answered
	all            sync.WaitGroup

	mu struct {
		sync.Mutex
		ended   bool // the topic is gone, or the consumer
		cause   error
		ready   int
		rota    rota
		sources []*source       // by address
		dialled map[string]bool // addresses of brokers that a goroutine connects to
		flights map[wire.MessageID]*flight
		waiting []waiting
		bytes   int           // of waiting
		room    chan struct{} // closed when there is room; nil: no source waits
	}
}

// waiting is what the consumer is to be written: a message, or an error of a broker.
type waiting struct {
	message wire.Message
	refusal *wire.Error // nil: a message
}

func (w *waiting) size() int { return wire.MessageFrameSize(len(w.message.Body)) }

// Subscribe relays a channel of a topic that other brokers have. It returns when the first of them
// has answered SUB. It refuses as that broker does. Error: client.ErrUnknown if the topic
// does not exist. notify is as for broker.Topic.Subscribe.
func (f *Forwarder) Subscribe(ctx context.Context, topic, channel string, about Subscriber, notify func()) (*Subscription, error) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	s := &Subscription{
		of: f, topic: topic, channel: channel, about: about, origin: f.origin(about.Publisher), notify: notify,
		changed: make(chan struct{}, 1), outcome: make(chan error, 1),
	}
	s.mu.flights, s.mu.dialled = map[wire.MessageID]*flight{}, map[string]bool{}
	var life context.Context
	life, s.stop = context.WithCancel(f.ctx)
	if !f.begin(func() { s.run(life) }) {
		s.stop()
		return nil, wire.NewError(wire.CodeSubFailed, "SUB failed, the broker stops")
	}
	var err error
	select {
	case err = <-s.outcome:
	case <-ctx.Done():
		s.mu.Lock()
		err = cmp.Or(s.mu.cause, ctx.Err())
		s.mu.Unlock()
		err = wire.Wrap(wire.CodeSubFailed, "SUB failed, no broker of the topic took the subscription in time", err)
	}
	if err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// run connects to the topic's brokers and moves the credit, until ctx ends.
func (s *Subscription) run(ctx context.Context) {
	s.of.consumers.Inc()
	defer s.of.consumers.Dec()
	defer s.all.Wait()
	defer s.stop()
	at := s.of.watch(s.topic)
	defer s.of.unwatch(at)
	pass := time.NewTimer(time.Hour)
	defer pass.Stop()
	pass.Stop()
	pauses, passing := 1, false
	for {
		addresses, changed, gone := at.get()
		if gone != nil {
			s.of.forget(at)
			s.failed(gone)
			s.end()
			return
		}
		for _, address := range addresses {
			s.connect(ctx, at, address)
		}
		if !passing && s.scarce() {
			pass.Reset(time.Duration(pauses) * passEvery)
			passing = true
		}
		select {
		case <-changed:
		case <-s.changed:
		case <-pass.C:
			pauses, passing = s.pass(), false
		case <-ctx.Done():
			return
		}
	}
}

// failed keeps why a broker did not take the subscription, and answers with an error that no
// other broker would make up for.
func (s *Subscription) failed(err error) {
	s.mu.Lock()
	s.mu.cause = err
	s.mu.Unlock()
	refused, _ := errors.AsType[*client.RefusedError](err)
	switch {
	case refused != nil && refused.Code != string(wire.CodeBadTopic): // that broker has the topic no more, or not yet
		err = wire.NewError(wire.ErrorCode(refused.Code), refused.Text)
	case errors.Is(err, errMany):
		err = wire.NewError(wire.CodeSubFailed, "SUB failed, "+errMany.Error())
	case !errors.Is(err, client.ErrUnknown):
		return
	}
	select {
	case s.outcome <- err:
	default: // there was an answer
	}
}

// end has the consumer's connection end.
func (s *Subscription) end() {
	s.mu.Lock()
	s.endLocked()
	s.mu.Unlock()
	s.notify()
}

func (s *Subscription) endLocked() {
	s.mu.ended = true
	s.of.waitingBytes.Add(-int64(s.mu.bytes))
	s.mu.waiting, s.mu.bytes, s.mu.flights = nil, 0, nil
}

// Close ends the connections to brokers, which give what the consumer held to others. It does
// not wait, and may be called more than once.
func (s *Subscription) Close() {
	s.stop()
	s.mu.Lock()
	s.endLocked()
	s.mu.Unlock()
}

// step does something with the lock held, and then has sources write what came of it.
func (s *Subscription) step(do func()) {
	s.mu.Lock()
	do()
	busy := s.divideLocked()
	s.mu.Unlock()
	for _, one := range busy {
		wake(one.busy)
	}
}

// divideLocked gives sources their parts of RDY, and returns those that have something to write.
func (s *Subscription) divideLocked() (busy []*source) {
	held := make([]int, len(s.mu.sources))
	for i, one := range s.mu.sources {
		held[i] = one.held
	}
	for i, part := range s.mu.rota.divide(s.mu.ready, held) {
		one := s.mu.sources[i]
		if one.part = one.conn.Ready(part); one.part != one.said || len(one.commands) > 0 {
			busy = append(busy, one)
		}
	}
	return busy
}

func (s *Subscription) scarce() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return scarce(s.mu.ready, len(s.mu.sources))
}

// pass moves the credit on, and returns how many pauses later that is next due.
func (s *Subscription) pass() (pauses int) {
	pauses = 1
	s.step(func() {
		s.expireLocked(clock.Mono())
		came := make([]int, len(s.mu.sources))
		for i, one := range s.mu.sources {
			came[i], one.came = one.came, 0
		}
		if scarce(s.mu.ready, len(came)) {
			pauses = s.mu.rota.pass(came)
		}
	})
	return pauses
}

// Take adds what is to be written now to out, as broker.Subscription.
func (s *Subscription) Take(out *broker.Outgoing, most int) (open bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, size := 0, 0
	for n < len(s.mu.waiting) && len(out.Frames) < most {
		w := &s.mu.waiting[n]
		if w.refusal != nil {
			out.Frames = wire.AppendError(out.Frames, w.refusal)
		} else {
			out.Relay(w.message)
		}
		n, size = n+1, size+w.size()
	}
	if s.mu.waiting = slices.Delete(s.mu.waiting, 0, n); len(s.mu.waiting) == 0 {
		s.mu.waiting = nil
	}
	s.mu.bytes -= size
	s.of.waitingBytes.Add(-int64(size))
	if n > 0 && s.mu.room != nil {
		close(s.mu.room)
		s.mu.room = nil
	}
	return !s.mu.ended
}

// Wrote does nothing: the messages' brokers record how late they are.
func (s *Subscription) Wrote(*broker.Outgoing) {}

// Holds returns how many messages the consumer may hold, and how many it does.
func (s *Subscription) Holds() (ready, inFlight int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.ready, len(s.mu.flights)
}

// Ready sets how many messages the consumer may hold, of all brokers together.
func (s *Subscription) Ready(n int) error {
	s.step(func() { s.mu.ready = n })
	wake(s.changed)
	return nil
}

// FinishBatch ends messages at their brokers, as broker.Subscription. Should a message have timed
// out there meanwhile, the consumer gets that broker's error later.
func (s *Subscription) FinishBatch(now mono.Time, batch []wire.MessageID, errs []error) []error {
	s.step(func() {
		s.expireLocked(now)
		for _, id := range batch {
			err := s.answerLocked(id, wire.CodeFinFailed, wire.AppendFin)
			if err == nil {
				s.landLocked(s.mu.flights[id])
			}
			errs = append(errs, err)
		}
	})
	return errs
}

// Requeue gives a message back to its broker. Errors: as answerLocked.
func (s *Subscription) Requeue(id wire.MessageID, delay time.Duration) (err error) {
	s.step(func() {
		err = s.answerLocked(id, wire.CodeReqFailed, func(dst []byte, remote wire.MessageID) []byte {
			return fmt.Appendf(dst, "REQ %s %d\n", remote, delay.Milliseconds())
		})
		if err == nil {
			s.landLocked(s.mu.flights[id])
		}
	})
	return err
}

// Touch restarts a message's timeout at its broker. Errors: as answerLocked.
func (s *Subscription) Touch(id wire.MessageID) (err error) {
	s.step(func() {
		err = s.answerLocked(id, wire.CodeTouchFailed, func(dst []byte, remote wire.MessageID) []byte {
			return fmt.Appendf(dst, "TOUCH %s\n", remote)
		})
		if err == nil {
			f := s.mu.flights[id]
			f.place.Remove()
			s.flyLocked(f)
		}
	})
	return err
}

// answerLocked appends a command about a message to what its broker is sent. Errors:
// queue.ErrNotInFlight; one with the code if the broker takes nothing.
func (s *Subscription) answerLocked(id wire.MessageID, failed wire.ErrorCode, command func([]byte, wire.MessageID) []byte) error {
	f := s.mu.flights[id]
	if f == nil {
		return queue.ErrNotInFlight
	}
	if len(f.of.commands) >= maxCommands {
		return wire.NewError(failed, fmt.Sprintf("the message's broker %s takes nothing", f.of.address))
	}
	f.of.commands = command(f.of.commands, f.remote)
	return nil
}

// flyLocked adds a message that the consumer holds from now on.
func (s *Subscription) flyLocked(f *flight) {
	f.expires = clock.Mono().Add(s.about.MsgTimeout + expiresAfter)
	f.of.flights.Push(&f.place, f)
}

// landLocked removes a message that the consumer does not hold any more.
func (s *Subscription) landLocked(f *flight) {
	f.place.Remove()
	f.of.held--
	delete(s.mu.flights, f.local)
}

// expireLocked removes messages that timed out at their brokers. So a consumer that answers
// nothing takes no more memory than its RDY does.
func (s *Subscription) expireLocked(now mono.Time) {
	for _, one := range s.mu.sources {
		for f := one.flights.Front(); f != nil && !now.Before(f.expires); f = one.flights.Front() {
			s.landLocked(f)
		}
	}
}

// took puts a message of a source into the line. The consumer sees the broker's id of it, unless
// it holds a message of another broker with the same id.
func (s *Subscription) took(one *source, m wire.Message) {
	ended := false
	s.step(func() {
		if ended = s.mu.ended; ended {
			return
		}
		s.expireLocked(clock.Mono())
		f := &flight{of: one, local: m.ID, remote: m.ID}
		for same := s.mu.flights[f.local]; same != nil; same = s.mu.flights[f.local] {
			if same.of == one { // it timed out, and comes again
				s.landLocked(same)
				break
			}
			copy(f.local[:], fmt.Sprintf("%016x", rand.Uint64()))
		}
		m.ID, s.mu.flights[f.local] = f.local, f
		one.held, one.came = one.held+1, one.came+1
		s.flyLocked(f)
		s.queueLocked(waiting{message: m})
	})
	if ended {
		return
	}
	s.of.relayed.WithLabelValues(s.of.targets.label(one.address)).Inc()
	s.notify()
}

func (s *Subscription) queueLocked(w waiting) {
	s.mu.waiting = append(s.mu.waiting, w)
	s.mu.bytes += w.size()
	s.of.waitingBytes.Add(int64(w.size()))
}

// refused tells the consumer that a broker does not know a message any more.
func (s *Subscription) refused(refusal *wire.Error) {
	s.mu.Lock()
	if !s.mu.ended {
		s.queueLocked(waiting{refusal: refusal})
	}
	s.mu.Unlock()
	s.notify()
}

// full returns what ends when there may be room for so many bytes; nil: there is room now. A
// consumer for which nothing waits has room.
func (s *Subscription) full(size int) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.mu.waiting) == 0 || s.mu.bytes+size <= maxWaiting && s.of.waitingBytes.Load()+int64(size) <= s.of.maxBytes {
		return nil
	}
	if s.mu.room == nil {
		s.mu.room = make(chan struct{})
	}
	return s.mu.room
}

// add lists a source that has the subscription, and remove ends it: what the consumer holds of
// it is not in flight any more.
func (s *Subscription) add(one *source) {
	s.step(func() {
		i, _ := slices.BinarySearchFunc(s.mu.sources, one.address, func(o *source, address string) int { return cmp.Compare(o.address, address) })
		s.mu.sources = slices.Insert(s.mu.sources, i, one)
	})
	wake(s.changed)
	select {
	case s.outcome <- nil:
	default: // another was first
	}
}

func (s *Subscription) remove(one *source) {
	s.step(func() {
		s.mu.sources = slices.DeleteFunc(s.mu.sources, func(o *source) bool { return o == one })
		for f := range one.flights.All() {
			s.landLocked(f)
		}
	})
	wake(s.changed)
}

// model is how a broker is connected to as the consumer.
func (s *Subscription) model() *nsq.Config {
	cfg := *s.of.model
	cfg.ClientID, cfg.Hostname, cfg.MsgTimeout, cfg.SampleRate = s.about.ClientID, s.about.Hostname, s.about.MsgTimeout, int32(s.about.SampleRate)
	cfg.OutputBufferSize, cfg.OutputBufferTimeout = -1, -1 // this broker gathers, as the consumer wants
	cfg.AuthSecret = s.of.secret(s.origin)
	return &cfg
}

// wake has the goroutine look that waits for a channel that is 1 deep.
func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// IsUnknown reports whether the topic does not exist.
func IsUnknown(err error) bool { return errors.Is(err, client.ErrUnknown) }
