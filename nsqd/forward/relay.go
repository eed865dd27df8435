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
	// maxWaiting is the maximum size of the messages that wait for one consumer, in bytes, unless a
	// single message is larger. Other messages stay with their broker.
	maxWaiting = 256 << 10
	// rotateInterval is how long a broker without messages keeps the only credit.
	rotateInterval = 250 * time.Millisecond
	// expiryMargin is how much longer than its broker a relay remembers a message that timed out.
	expiryMargin = time.Second
	// settleCheck is the interval in which Subscribe looks at Others.Until.
	settleCheck = 100 * time.Millisecond
)

// Subscriber is a consumer that is connected to this broker.
type Subscriber struct {
	Publisher  // the consumer's identity
	Hostname   string
	MsgTimeout time.Duration
	SampleRate int
	Attributes bool // Take's Encoder needs the messages' attributes
	Others     *Others
}

// Others makes a subscription relay the other brokers of the topic alone, for a consumer with a subscription of
// its own to this broker's part. Nil: the subscription relays all brokers.
type Others struct {
	Here bool // the consumer has subscribed to this broker's part
	// Until is when Subscribe stops waiting for all other brokers: if Here is set, or if a broker has accepted
	// the subscription.
	Until mono.Time
}

// Subscription relays the messages of a topic's brokers to one consumer. It has a connection to
// each broker (source). The methods are like broker.Subscription's, and do not block either.
type Subscription struct {
	// Set once.
	forwarder      *Forwarder
	topic, channel string
	subscriber     Subscriber
	origin         string
	notify         func()
	stop           context.CancelFunc
	changed        chan struct{} // capacity 1: ready or sources changed
	outcome        chan error    // capacity 1: the first broker's answer to SUB
	all            sync.WaitGroup

	mu struct {
		sync.Mutex
		ended    bool // the topic or the consumer is gone
		cause    error
		ready    int
		here     bool // this broker has a part of the topic, according to the last lookup
		rota     rota
		sources  []*source       // by address
		dialled  map[string]bool // addresses of brokers that have a connecting goroutine
		inFlight map[wire.MessageID]*inFlightMessage
		waiting  []waiting
		bytes    int           // size of waiting
		room     chan struct{} // closed when there is room; nil: no source waits
	}
}

// waiting is an item to write to the consumer: a message, or a broker's error.
type waiting struct {
	message   wire.Message
	attribute []byte
	refusal   *wire.Error // nil: a message
}

func (w *waiting) size() int { return wire.MessageFrameSize(len(w.attribute) + len(w.message.Body)) }

// Subscribe relays a channel of a topic on other brokers. It returns once the first broker has
// answered SUB, with that broker's refusal, if any. With Others, Subscribe waits until all other brokers have
// answered, or until Others.Until. Error: client.ErrUnknown if the topic does not exist. notify is as for
// broker.Topic.Subscribe. With Others, notify also follows a change of Here or Brokers.
func (f *Forwarder) Subscribe(ctx context.Context, topic, channel string, subscriber Subscriber, notify func()) (*Subscription, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	s := &Subscription{
		forwarder: f, topic: topic, channel: channel, subscriber: subscriber, origin: f.origin(subscriber.Publisher, subscriber.Attributes), notify: notify,
		changed: make(chan struct{}, 1), outcome: make(chan error, 1),
	}
	s.mu.inFlight, s.mu.dialled = map[wire.MessageID]*inFlightMessage{}, map[string]bool{}
	var runCtx context.Context
	runCtx, s.stop = context.WithCancel(f.ctx)
	if !f.start(func() { s.run(runCtx) }) {
		s.stop()
		return nil, wire.NewError(wire.CodeSubFailed, "SUB failed, the broker stops")
	}
	if err := s.await(ctx); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// await waits until Subscribe can return, and returns the error of Subscribe.
func (s *Subscription) await(ctx context.Context) error {
	var check <-chan time.Time // nil: wait for the outcome alone
	if s.subscriber.Others != nil {
		ticker := time.NewTicker(settleCheck)
		defer ticker.Stop()
		check = ticker.C
	}
	for {
		select {
		case err := <-s.outcome:
			return err
		case <-check:
			if o := s.subscriber.Others; !clock.Mono().Before(o.Until) && (o.Here || s.Brokers() > 0) {
				return nil
			}
		case <-ctx.Done():
			s.mu.Lock()
			defer s.mu.Unlock()
			return wire.Wrap(wire.CodeSubFailed, "SUB failed, no broker of the topic took the subscription in time", cmp.Or(s.mu.cause, ctx.Err()))
		}
	}
}

// run connects to the topic's brokers and moves the credit, until ctx ends.
func (s *Subscription) run(ctx context.Context) {
	s.forwarder.consumers.Inc()
	defer s.forwarder.consumers.Dec()
	defer s.all.Wait()
	defer s.stop()
	brokers := s.forwarder.watch(s.topic)
	defer s.forwarder.unwatch(brokers)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	timer.Stop()
	pauses, scheduled := 1, false
	for {
		addresses, changed, lookupErr := brokers.get()
		if lookupErr != nil {
			s.forwarder.discard(brokers)
			s.recordFailure(lookupErr)
			s.end()
			return
		}
		s.follow(ctx, brokers, addresses)
		if !scheduled && s.scarce() {
			timer.Reset(time.Duration(pauses) * rotateInterval)
			scheduled = true
		}
		select {
		case <-changed:
		case <-s.changed:
		case <-timer.C:
			pauses, scheduled = s.pass(), false
		case <-ctx.Done():
			return
		}
	}
}

// follow connects to the brokers that a lookup has found. If enough brokers have accepted the subscription,
// follow ends the wait of Subscribe.
func (s *Subscription) follow(ctx context.Context, brokers *topic, addresses []string) {
	others, here := addresses, false
	if s.subscriber.Others != nil {
		others = slices.DeleteFunc(slices.Clone(addresses), func(address string) bool { return address == s.forwarder.address })
		here = len(others) < len(addresses)
	}
	for _, address := range others {
		s.connect(ctx, brokers, address)
	}
	s.mu.Lock()
	changed := here != s.mu.here
	s.mu.here = here
	enough := len(s.mu.sources) > 0
	if s.subscriber.Others != nil {
		enough = len(addresses) > 0
		for _, address := range others {
			enough = enough && slices.ContainsFunc(s.mu.sources, func(src *source) bool { return src.address == address })
		}
	}
	s.mu.Unlock()
	if changed {
		s.notify()
	}
	if enough {
		s.answer(nil)
	}
}

// answer ends the wait of Subscribe, unless Subscribe has an answer.
func (s *Subscription) answer(err error) {
	select {
	case s.outcome <- err:
	default:
	}
}

// Brokers returns the number of brokers that have accepted the subscription.
func (s *Subscription) Brokers() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.mu.sources)
}

// Here reports whether this broker has a part of the topic. The consumer must subscribe to the part. Without
// Others, Here is false.
func (s *Subscription) Here() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.here
}

// recordFailure records why a broker did not accept the subscription. If no other broker can help, the
// error answers Subscribe.
func (s *Subscription) recordFailure(err error) {
	s.mu.Lock()
	s.mu.cause = err
	s.mu.Unlock()
	refused, _ := errors.AsType[*client.RefusedError](err)
	switch {
	case refused != nil && refused.Code != string(wire.CodeBadTopic): // with CodeBadTopic, the broker does not have the topic any more, or not yet
		err = wire.NewError(wire.ErrorCode(refused.Code), refused.Text)
	case errors.Is(err, errTooManySources):
		err = wire.NewError(wire.CodeSubFailed, "SUB failed, "+errTooManySources.Error())
	case !errors.Is(err, client.ErrUnknown):
		return
	}
	s.answer(err)
}

// end makes the consumer's connection end.
func (s *Subscription) end() {
	s.mu.Lock()
	s.endLocked()
	s.mu.Unlock()
	s.notify()
}

func (s *Subscription) endLocked() {
	s.mu.ended = true
	s.forwarder.waitingBytes.Add(-int64(s.mu.bytes))
	s.mu.waiting, s.mu.bytes, s.mu.inFlight = nil, 0, nil
}

// Close ends the connections to brokers, which requeue the consumer's messages. It does not wait,
// and may be called more than once.
func (s *Subscription) Close() {
	s.stop()
	s.mu.Lock()
	s.endLocked()
	s.mu.Unlock()
}

// step runs do with the lock held, and then makes sources write their new commands.
func (s *Subscription) step(do func()) {
	s.mu.Lock()
	do()
	pending := s.divideLocked()
	s.mu.Unlock()
	for _, src := range pending {
		wake(src.hasCommands)
	}
}

// divideLocked gives sources their parts of RDY, and returns the sources with something to write.
func (s *Subscription) divideLocked() (pending []*source) {
	held := make([]int, len(s.mu.sources))
	for i, src := range s.mu.sources {
		held[i] = src.held
	}
	for i, credit := range s.mu.rota.divide(s.mu.ready, held) {
		src := s.mu.sources[i]
		if src.credit = src.conn.Ready(credit); src.credit != src.sentReady || len(src.commands) > 0 {
			pending = append(pending, src)
		}
	}
	return pending
}

func (s *Subscription) scarce() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return scarce(s.mu.ready, len(s.mu.sources))
}

// pass moves the credit on, and returns how many pauses later the next pass is due.
func (s *Subscription) pass() (pauses int) {
	pauses = 1
	s.step(func() {
		s.expireLocked(clock.Mono())
		received := make([]int, len(s.mu.sources))
		for i, src := range s.mu.sources {
			received[i], src.received = src.received, 0
		}
		if scarce(s.mu.ready, len(received)) {
			pauses = s.mu.rota.pass(received)
		}
	})
	return pauses
}

// Take appends the waiting items to out, as broker.Subscription does.
func (s *Subscription) Take(out *broker.Outgoing, limit int) (open bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, size := 0, 0
	for n < len(s.mu.waiting) && len(out.Frames) < limit {
		w := &s.mu.waiting[n]
		if w.refusal != nil {
			if out.Encoder == nil { // other protocols have no errors for finished messages
				out.Frames = wire.AppendError(out.Frames, w.refusal)
			}
		} else {
			out.Relay(w.message, w.attribute)
		}
		n, size = n+1, size+w.size()
	}
	if s.mu.waiting = slices.Delete(s.mu.waiting, 0, n); len(s.mu.waiting) == 0 {
		s.mu.waiting = nil
	}
	s.mu.bytes -= size
	s.forwarder.waitingBytes.Add(-int64(size))
	if n > 0 && s.mu.room != nil {
		close(s.mu.room)
		s.mu.room = nil
	}
	return !s.mu.ended
}

// Wrote does nothing: the messages' brokers record latencies.
func (s *Subscription) Wrote(*broker.Outgoing) {}

// Holds returns how many messages the consumer may hold, and how many it holds.
func (s *Subscription) Holds() (ready, inFlight int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.ready, len(s.mu.inFlight)
}

// Ready sets how many messages the consumer may hold, from all brokers together.
func (s *Subscription) Ready(n int) error {
	s.step(func() { s.mu.ready = n })
	wake(s.changed)
	return nil
}

// FinishBatch finishes messages at their brokers, as broker.Subscription does. If a message has
// timed out at its broker meanwhile, the consumer gets that broker's error later.
func (s *Subscription) FinishBatch(now mono.Time, batch []wire.MessageID, errs []error) []error {
	s.step(func() {
		s.expireLocked(now)
		for _, id := range batch {
			err := s.answerLocked(id, wire.CodeFinFailed, wire.AppendFin)
			if err == nil {
				s.untrackLocked(s.mu.inFlight[id])
			}
			errs = append(errs, err)
		}
	})
	return errs
}

// Requeue returns a message to its broker. Errors: from answerLocked.
func (s *Subscription) Requeue(id wire.MessageID, delay time.Duration) (err error) {
	s.step(func() {
		err = s.answerLocked(id, wire.CodeReqFailed, func(dst []byte, remote wire.MessageID) []byte {
			return fmt.Appendf(dst, "REQ %s %d\n", remote, delay.Milliseconds())
		})
		if err == nil {
			s.untrackLocked(s.mu.inFlight[id])
		}
	})
	return err
}

// Touch restarts a message's timeout at its broker. Errors: from answerLocked.
func (s *Subscription) Touch(id wire.MessageID) (err error) {
	s.step(func() {
		err = s.answerLocked(id, wire.CodeTouchFailed, func(dst []byte, remote wire.MessageID) []byte {
			return fmt.Appendf(dst, "TOUCH %s\n", remote)
		})
		if err == nil {
			f := s.mu.inFlight[id]
			f.element.Remove()
			s.trackLocked(f)
		}
	})
	return err
}

// answerLocked appends a command about a message to its broker's commands. Errors:
// queue.ErrNotInFlight; an error with code failed if the broker reads nothing.
func (s *Subscription) answerLocked(id wire.MessageID, failed wire.ErrorCode, command func([]byte, wire.MessageID) []byte) error {
	f := s.mu.inFlight[id]
	if f == nil {
		return queue.ErrNotInFlight
	}
	if len(f.source.commands) >= maxCommands {
		return wire.NewError(failed, fmt.Sprintf("the message's broker %s reads nothing", f.source.address))
	}
	f.source.commands = command(f.source.commands, f.remote)
	return nil
}

// trackLocked adds a message that the consumer holds now.
func (s *Subscription) trackLocked(f *inFlightMessage) {
	f.expires = clock.Mono().Add(s.subscriber.MsgTimeout + expiryMargin)
	f.source.inFlight.Push(&f.element, f)
}

// untrackLocked removes a message that the consumer no longer holds.
func (s *Subscription) untrackLocked(f *inFlightMessage) {
	f.element.Remove()
	f.source.held--
	delete(s.mu.inFlight, f.local)
}

// expireLocked removes messages that timed out at their brokers. This limits the memory for an
// unresponsive consumer to its RDY.
func (s *Subscription) expireLocked(now mono.Time) {
	for _, src := range s.mu.sources {
		for f := src.inFlight.Front(); f != nil && !now.Before(f.expires); f = src.inFlight.Front() {
			s.untrackLocked(f)
		}
	}
}

// deliver queues a message from a source. The consumer sees the broker's message id, unless the
// consumer holds a message from another broker with the same id.
func (s *Subscription) deliver(src *source, m wire.Message, attribute []byte) {
	ended := false
	s.step(func() {
		if ended = s.mu.ended; ended {
			return
		}
		s.expireLocked(clock.Mono())
		f := &inFlightMessage{source: src, local: m.ID, remote: m.ID}
		for duplicate := s.mu.inFlight[f.local]; duplicate != nil; duplicate = s.mu.inFlight[f.local] {
			if duplicate.source == src { // the message timed out and was delivered again
				s.untrackLocked(duplicate)
				break
			}
			copy(f.local[:], fmt.Sprintf("%016x", rand.Uint64()))
		}
		m.ID, s.mu.inFlight[f.local] = f.local, f
		src.held, src.received = src.held+1, src.received+1
		s.trackLocked(f)
		s.queueLocked(waiting{message: m, attribute: attribute})
	})
	if ended {
		return
	}
	s.forwarder.relayed.WithLabelValues(s.forwarder.targets.label(src.address)).Inc()
	s.notify()
}

func (s *Subscription) queueLocked(w waiting) {
	s.mu.waiting = append(s.mu.waiting, w)
	s.mu.bytes += w.size()
	s.forwarder.waitingBytes.Add(int64(w.size()))
}

// queueRefusal queues an error for the consumer: a broker no longer knows a message.
func (s *Subscription) queueRefusal(refusal *wire.Error) {
	s.mu.Lock()
	if !s.mu.ended {
		s.queueLocked(waiting{refusal: refusal})
	}
	s.mu.Unlock()
	s.notify()
}

// roomFor returns a channel that is closed when there may be room for size bytes, or nil if there is
// room now. A consumer without waiting items always has room.
func (s *Subscription) roomFor(size int) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.mu.waiting) == 0 || s.mu.bytes+size <= maxWaiting && s.forwarder.waitingBytes.Load()+int64(size) <= s.forwarder.maxBytes {
		return nil
	}
	if s.mu.room == nil {
		s.mu.room = make(chan struct{})
	}
	return s.mu.room
}

// add adds a source whose broker accepted the subscription.
func (s *Subscription) add(src *source) {
	s.step(func() {
		i, _ := slices.BinarySearchFunc(s.mu.sources, src.address, func(o *source, address string) int { return cmp.Compare(o.address, address) })
		s.mu.sources = slices.Insert(s.mu.sources, i, src)
	})
	s.brokersChanged()
}

// brokersChanged follows a change of sources.
func (s *Subscription) brokersChanged() {
	wake(s.changed)
	s.mu.Lock()
	open := !s.mu.ended
	s.mu.Unlock()
	if open && s.subscriber.Others != nil {
		s.notify()
	}
}

func (s *Subscription) remove(src *source) {
	s.step(func() {
		s.mu.sources = slices.DeleteFunc(s.mu.sources, func(o *source) bool { return o == src })
		for f := range src.inFlight.All() {
			s.untrackLocked(f)
		}
	})
	s.brokersChanged()
}

// model returns the configuration of a connection to a broker as the consumer.
func (s *Subscription) model() *nsq.Config {
	cfg := *s.forwarder.model
	cfg.ClientID, cfg.Hostname, cfg.MsgTimeout, cfg.SampleRate = s.subscriber.ClientID, s.subscriber.Hostname, s.subscriber.MsgTimeout, int32(s.subscriber.SampleRate)
	cfg.OutputBufferSize, cfg.OutputBufferTimeout = -1, -1 // this broker buffers, as the consumer requested
	cfg.AuthSecret = s.forwarder.secret(s.origin)
	return &cfg
}

// wake wakes the goroutine that waits for c, which has capacity 1.
func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// IsUnknown reports whether the topic does not exist.
func IsUnknown(err error) bool { return errors.Is(err, client.ErrUnknown) }
