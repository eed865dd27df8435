package broker

import (
	"fmt"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/queue"
)

// Subscription is a consumer of a channel. Its owner, a connection, takes deliveries when
// notified, and reports the deliveries that it has written.
type Subscription struct {
	// Set once.
	id      queue.ConsumerID
	topic   *Topic
	channel *queue.Channel
	// notify reports that there are deliveries or that the subscription is closed. It must
	// not block; no lock is held.
	notify func()

	// Guarded by the topic's mu.
	outbox  outbox
	closed  bool
	stopped bool // the consumer gets no more messages
}

// Subscriber describes a consumer.
type Subscriber struct {
	// MsgTimeout bounds the time to finish a message; then another consumer gets it.
	MsgTimeout time.Duration
	// SampleRate is the wanted percentage of messages; 0 means all.
	SampleRate int
	// Distance is the consumer's priority for messages that several consumers could get.
	Distance queue.Distance
}

// Subscribe adds a consumer to the channel. If necessary, Subscribe creates the channel
// durably. It also works while the broker drains, since held messages may still be
// delivered. In a cluster it waits for Config.Confirm.
// Errors: ErrBadName, ErrGone, ErrTooManyChannels, ErrTooManyConsumers, ErrStorage, and
// ErrDraining after the broker is closed.
func (t *Topic) Subscribe(channel string, about Subscriber, notify func()) (*Subscription, error) {
	sub, err := t.subscribe(channel, about, notify)
	if err != nil {
		return nil, err
	}
	if err := t.channels.confirm(channel); err != nil {
		sub.Close()
		t.channels.discardUnknown(channel)
		return nil, err
	}
	return sub, nil
}

func (t *Topic) subscribe(channel string, about Subscriber, notify func()) (sub *Subscription, err error) {
	if !wire.ValidChannelName(channel) {
		return nil, fmt.Errorf("channel %q: %w", channel, ErrBadName)
	}
	if !t.channels.has(channel) && !t.runner.shared.draining.Load() {
		if err := t.channels.orderChannel(channel); err != nil {
			return nil, err
		}
	}
	s := t.runner.begin()
	defer t.runner.end(s)
	now := t.runner.shared.now()
	switch {
	case t.runner.mu.closed && t.runner.shared.draining.Load():
		return nil, ErrDraining
	case t.runner.mu.closed:
		return nil, ErrGone
	}
	c, err := t.channels.channel(now, channel, s, false)
	if err != nil {
		return nil, err
	}
	if most := t.runner.shared.cfg.MaxChannelConsumers; most > 0 && c.Consumers().Len() >= most {
		return nil, fmt.Errorf("channel %q of topic %q, %d consumers: %w", channel, t.runner.name, c.Consumers().Len(), ErrTooManyConsumers)
	}
	sub = &Subscription{
		id:      queue.ConsumerID(t.runner.shared.lastConsumer.Add(1)),
		topic:   t,
		channel: c,
		notify:  notify,
	}
	sub.channel.Consumers().Add(sub.id, about.MsgTimeout, about.SampleRate, about.Distance)
	t.runner.mu.consumers[sub.id] = sub
	return sub, nil
}

// has reports whether the topic has a channel.
func (cs *channelSet) has(channel string) bool {
	cs.runner.mu.Lock()
	defer cs.runner.mu.Unlock()
	return cs.runner.mu.core.Channel(channel) != nil
}

// Take adds messages to out until out has at least most bytes, and reports whether the
// subscription is still open. Messages that the subscriber cannot write yet should stay
// here, where they can time out and go to another consumer. If Take adds nothing to an
// empty out, no message is left, and notify reports the next.
func (s *Subscription) Take(out *Outgoing, most int) (open bool) {
	st := s.topic.runner.begin()
	defer s.topic.runner.end(st)
	if s.closed {
		return false
	}
	now := s.topic.runner.shared.now()
	for s.outbox.len() > 0 && len(out.Frames) < most {
		if d := s.outbox.pop(); s.channel.MarkSent(d) {
			out.add(&d)
		}
	}
	if s.channel.Consumers().Stalled(s.id) {
		s.outbox.retain(queue.Delivery.IsCurrent)
		s.topic.runner.mu.core.Resume(now, s.channel, s.id, &st.fx)
	}
	return true
}

// Holds returns the maximum and the current number of messages that the subscriber holds.
func (s *Subscription) Holds() (ready, inFlight int) {
	s.topic.runner.mu.Lock()
	defer s.topic.runner.mu.Unlock()
	return s.channel.Consumers().Holds(s.id)
}

// Wrote records that out was written to the subscriber's socket.
func (s *Subscription) Wrote(out *Outgoing) {
	s.topic.runner.metrics.recordWritten(s.topic.runner.shared.now(), out.sent)
}

// Rest stops deliveries until the next Ready. If the subscriber holds no messages,
// deliveries stop for good; then the subscription can be closed without duplicate
// deliveries. ready is the previous maximum number of messages.
func (s *Subscription) Rest() (ready int, rests bool) {
	err := s.step(func(st *step) error {
		var inFlight int
		ready, inFlight = s.channel.Consumers().Holds(s.id)
		s.stopped = s.stopped || inFlight == 0
		rests = s.stopped
		return s.topic.runner.mu.core.SetReady(s.topic.runner.shared.now(), s.channel, s.id, 0, &st.fx)
	})
	return ready, rests || err != nil
}

// Ready sets the maximum number of messages that the subscriber may hold. Error: ErrGone.
func (s *Subscription) Ready(n int) error {
	return s.step(func(st *step) error {
		if s.stopped {
			n = 0
		}
		return s.topic.runner.mu.core.SetReady(s.topic.runner.shared.now(), s.channel, s.id, n, &st.fx)
	})
}

// FinishBatch finishes messages while holding the lock once, and appends the result of each
// to errs.
// Errors: queue.ErrNotInFlight, ErrGone.
func (s *Subscription) FinishBatch(now mono.Time, batch []wire.MessageID, errs []error) []error {
	st := s.topic.runner.begin()
	defer s.topic.runner.end(st)
	if s.closed {
		for range batch {
			errs = append(errs, ErrGone)
		}
		return errs
	}
	now = s.topic.runner.instant(now)
	errs = s.topic.runner.mu.core.FinishBatch(now, s.channel, s.id, batch, &st.fx, errs)
	s.topic.channels.finished(now, s.channel, st.fx.Finished)
	return errs
}

// Requeue returns a message for another delivery after delay.
// Errors: queue.ErrNotInFlight, ErrGone.
func (s *Subscription) Requeue(id wire.MessageID, delay time.Duration) error {
	return s.step(func(st *step) error {
		now := s.topic.runner.shared.now()
		return s.topic.runner.mu.core.Requeue(now, s.channel, s.id, id, delay, &st.fx)
	})
}

// Touch restarts a message's timeout. Errors: queue.ErrNotInFlight, ErrGone.
func (s *Subscription) Touch(id wire.MessageID) error {
	return s.step(func(*step) error {
		now := s.topic.runner.shared.now()
		return s.topic.runner.mu.core.Touch(now, s.channel, s.id, id)
	})
}

// Close returns the messages that the subscriber holds. Close may be called more than once.
func (s *Subscription) Close() {
	t := s.topic
	st := t.runner.begin()
	if s.closed {
		t.runner.end(st)
		return
	}
	now := t.runner.shared.now()
	t.runner.mu.core.RemoveConsumer(now, s.channel, s.id, &st.fx)
	t.channels.detach(s)
	if wire.Ephemeral(s.channel.Name()) && s.channel.Consumers().Len() == 0 {
		t.channels.removeChannel(now, s.channel, st)
	}
	t.runner.end(st)
	t.deleteIfEphemeral()
}

// detach ends the subscription. Requires: mu held.
func (cs *channelSet) detach(s *Subscription) {
	s.closed = true
	s.outbox = outbox{}
	delete(cs.runner.mu.consumers, s.id)
}

func (s *Subscription) step(do func(*step) error) error {
	st := s.topic.runner.begin()
	defer s.topic.runner.end(st)
	if s.closed {
		return ErrGone
	}
	return do(st)
}

// outbox is a FIFO of deliveries that a subscriber has not taken yet. nsqd/queue bounds the
// number of deliveries to twice the maximum RDY. The zero value is empty.
//
// Invariant: buf[:head] and buf[len(buf):cap(buf)] refer to no message.
type outbox struct {
	buf  []queue.Delivery
	head int
}

// outboxKept is the number of slots that an empty outbox keeps (192 KiB). It exceeds the
// default maximum RDY. With fewer slots, a fast subscriber would reallocate the buffer on
// every refill.
const outboxKept = 4096

func (o *outbox) len() int { return len(o.buf) - o.head }

func (o *outbox) push(d queue.Delivery) {
	if len(o.buf) == cap(o.buf) && o.head > len(o.buf)/2 {
		o.retain(nil)
	}
	o.buf = append(o.buf, d)
}

// pop removes the oldest delivery. Requires: len() > 0.
func (o *outbox) pop() queue.Delivery {
	d := o.buf[o.head]
	o.buf[o.head] = queue.Delivery{}
	o.head++
	if o.len() == 0 {
		o.buf, o.head = o.buf[:0], 0
		if cap(o.buf) > outboxKept {
			o.buf = nil
		}
	}
	return d
}

// retain drops deliveries that are not current, and moves the rest to the front. nil keeps
// all.
func (o *outbox) retain(current func(queue.Delivery) bool) {
	n := 0
	for _, d := range o.buf[o.head:] {
		if current == nil || current(d) {
			o.buf[n] = d
			n++
		}
	}
	clear(o.buf[n:])
	o.buf, o.head = o.buf[:n], 0
}

// Outgoing holds frames to be written to a subscriber, and the values to record after the
// write. It refers to no message: Take encodes messages under the topic's lock, so a
// finished message can be reused immediately. The alternative, reference counts during the
// write, would pin messages for as long as a slow subscriber takes. The zero value is
// empty.
type Outgoing struct {
	// Frames are the encoded messages, owned by the owner of the Outgoing.
	Frames []byte
	// Encoder encodes the messages; nil: as NSQ frames.
	Encoder Encoder

	sent    []sent
	message *wire.Message // for Encoder; nil until used
}

// Encoder encodes messages for a subscriber that does not speak NSQ's protocol. An Encoder must
// not block, since Take calls it under the topic's lock.
type Encoder interface {
	// AppendMessage appends a message to dst. The message and the attribute are only valid during
	// the call. If AppendMessage returns dst unchanged, the subscriber holds the message anyway,
	// and must finish it.
	AppendMessage(dst []byte, m *wire.Message, attribute []byte) []byte
}

// sent is a delivery without its message.
type sent struct {
	due      mono.Time     // time from which the delivery is late
	access   time.Duration // access delay
	consumer time.Duration // time after due spent waiting for consumers
	first    bool          // first delivery of the message
}

// Messages returns the number of messages in Frames.
func (o *Outgoing) Messages() int { return len(o.sent) }

// Reset empties o and keeps its memory and its Encoder.
func (o *Outgoing) Reset() { o.Frames, o.sent = o.Frames[:0], o.sent[:0] }

// Relay adds a message of another broker. The other broker records the latency.
func (o *Outgoing) Relay(m wire.Message, attribute []byte) {
	o.encode(m, attribute)
	o.sent = append(o.sent, sent{})
}

func (o *Outgoing) encode(m wire.Message, attribute []byte) {
	if o.Encoder == nil {
		o.Frames = slices.Grow(o.Frames, wire.MessageFrameSize(len(m.Body))) // one growth for all fields
		o.Frames = wire.AppendMessage(o.Frames, m.Timestamp, m.Attempts, m.ID, m.Body)
		return
	}
	if o.message == nil {
		o.message = new(wire.Message)
	}
	*o.message = m
	o.Frames = o.Encoder.AppendMessage(o.Frames, o.message, attribute)
	*o.message = wire.Message{}
}

func (o *Outgoing) add(d *queue.Delivery) {
	m := d.Message
	o.encode(wire.Message{Timestamp: int64(m.Timestamp), Attempts: d.Attempts, ID: m.ID, Body: m.Body}, m.Attribute())
	// due does not include delays of the broker, which count as latency. Waits for
	// consumers are recorded separately.
	due := m.Arrival.Add(max(m.Access, m.Defer))
	held := max(0, m.Held-max(0, m.Defer-m.Access))
	o.sent = append(o.sent, sent{due: due, access: m.Access, consumer: held + d.Waited, first: d.Attempts == 1})
}
