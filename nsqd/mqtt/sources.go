package mqtt

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/mqtt/session"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
)

// Sources are a client's broker subscriptions. For each topic and channel of the client's filters there is a
// source of this broker's part of the topic, if the broker has a part, and a relay of the other brokers' parts, if
// the broker forwards. Together the sources send at most as many unacknowledged messages as the client accepts.
type Sources struct {
	client *Client // set once

	// The next relay of a topic that the control plane did not know; owned by the reader.
	relayAt    mono.Time
	relayPause time.Duration // before relayAt

	// mu is held during calls of subscriptions, which encode messages under Client.mu.
	mu        sync.Mutex
	all       []*source // by number; nil: free
	closed    bool
	window    int // messages that the client accepts without PUBACK
	next      int // number of the source that is next in turn
	taken     *source
	finishing *source
	scratch   []error
}

// source is a broker subscription. It encodes the messages of the subscription.
type source struct {
	// Set once.
	client *Client
	is     session.Source
	sub    Subscription
	others Others // of sub; nil: sub is of this broker

	pending atomic.Bool // there may be messages

	// Guarded by Sources.mu.
	ended   bool             // the broker has ended the subscription
	brokers int              // in the last division of the window
	here    bool             // the relay knows a part on this broker
	dropped []wire.MessageID // messages that the client does not want
	once    []wire.MessageID // messages with QoS 0, to finish after the write
	blocked []wire.MessageID // messages for which the window has no room
}

// AppendMessage implements broker.Encoder.
func (s *source) AppendMessage(dst []byte, m *wire.Message, attribute []byte) []byte {
	s.client.mu.Lock()
	defer s.client.mu.Unlock()
	dst, outcome := s.client.Session.AppendMessage(dst, &s.is, m, attribute)
	switch outcome {
	case session.Unwanted, session.TooLarge:
		s.dropped = append(s.dropped, m.ID)
	case session.SentOnce:
		s.once = append(s.once, m.ID)
	case session.Blocked:
		s.blocked = append(s.blocked, m.ID)
	case session.Sent:
	}
	if outcome == session.TooLarge {
		s.client.server.metrics.tooLarge.Inc()
	}
	return dst
}

// windowOpen returns how many messages may still be sent.
func (c *Client) windowOpen() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.Session.Window()
}

// open opens the sources of a topic and a channel that are not open. It may block. For other brokers that do not
// answer, it waits until the given time. If again is positive, call open again after this time.
func (ss *Sources) open(topic, channel string, until mono.Time) (again time.Duration, err error) {
	for range maxCreations {
		here, err := ss.openPart(topic, channel, false, func(_ *source, notify func()) (Subscription, error) {
			return ss.client.conn.Subscribe(topic, channel, notify)
		})
		if err != nil {
			return 0, err
		}
		relayed, err := ss.openPart(topic, channel, true, func(src *source, notify func()) (sub Subscription, err error) {
			sub, src.others, err = ss.client.conn.Relay(topic, channel, here != nil, until, notify)
			return sub, err
		})
		switch {
		case here != nil && errors.Is(err, broker.ErrUnknownTopic):
			now := ss.client.server.now()
			if ss.relayPause == 0 || !now.Before(ss.relayAt) {
				ss.relayPause = min(max(relayAfter, 2*ss.relayPause), maxRelayAfter)
				ss.relayAt = now.Add(ss.relayPause)
			}
			return ss.relayAt.Sub(now), nil
		case err != nil:
			return 0, err
		case here != nil || relayed != nil && !relayed.others.Here():
			return 0, nil
		}
	}
	return reopenAfter, nil // the part on this broker comes or goes
}

// maxCreations is the maximum number of attempts to open a topic's part on this broker at once.
const maxCreations = 3

// openPart returns the source of a topic and a channel, on this broker or on the other brokers. If it is not open,
// openPart opens it. nil: there is none.
func (ss *Sources) openPart(topic, channel string, relayed bool, open func(*source, func()) (Subscription, error)) (*source, error) {
	ss.mu.Lock()
	found := ss.find(topic, channel, relayed)
	ss.mu.Unlock()
	if found != nil {
		return found, nil
	}
	if !ss.client.shared { // a writer reads shared after the first source
		ss.client.shared = true
	}
	src := &source{client: ss.client, is: session.Source{Topic: topic, Channel: channel}}
	sub, err := open(src, func() {
		src.pending.Store(true)
		ss.client.conn.Notify()
	})
	if err != nil || sub == nil {
		return nil, err
	}
	ss.mu.Lock()
	defer ss.mu.Unlock()
	src.sub = sub
	if ss.window == 0 { // no message is under way yet
		ss.window = ss.client.windowOpen()
	}
	free := slices.Index(ss.all, nil)
	if free < 0 {
		free = len(ss.all)
		ss.all = append(ss.all, nil)
	}
	src.is.Number = uint16(free)
	ss.all[free] = src
	ss.divide()
	if src.pending.Load() {
		ss.client.conn.Notify() // an earlier notification has found no source
	}
	return src, nil
}

// find returns the source of a topic and a channel, on this broker or on the other brokers, or nil. Requires: mu
// held.
func (ss *Sources) find(topic, channel string, relayed bool) *source {
	for _, src := range ss.all {
		if src != nil && !src.ended && src.is.Topic == topic && src.is.Channel == channel && (src.others != nil) == relayed {
			return src
		}
	}
	return nil
}

// divide gives each source a part of the window for each of its brokers. With more brokers than the window has
// room, each source may hold one message, and Take waits until the window has room. Requires: mu held.
func (ss *Sources) divide() {
	brokers := 0
	for _, src := range ss.all {
		if src == nil {
			continue
		}
		if src.brokers = 1; src.others != nil {
			src.brokers = src.others.Brokers()
		}
		brokers += src.brokers
	}
	for _, src := range ss.all {
		if src != nil {
			_ = src.sub.Ready(max(1, ss.window*src.brokers/max(1, brokers))) // an error means that the subscription has ended, which Take reports
		}
	}
}

// follow divides the window again if the brokers of a relay have changed. If this broker has got a part of the
// relay's topic, follow makes the driver open the part. Requires: mu held.
func (ss *Sources) follow(src *source) {
	if src.others == nil {
		return
	}
	if src.others.Brokers() != src.brokers {
		ss.divide()
	}
	here := src.others.Here()
	if here && !src.here && ss.find(src.is.Topic, src.is.Channel, false) == nil {
		ss.client.refresh()
	}
	src.here = here
}

// retain closes the sources that have ended or that keep does not want.
func (ss *Sources) retain(keep func(topic, channel string) bool) {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	for i, src := range ss.all {
		if src == nil || !src.ended && keep(src.is.Topic, src.is.Channel) {
			continue
		}
		src.sub.Close()
		ss.all[i] = nil
		if ss.taken == src {
			ss.taken = nil
		}
		if ss.finishing == src {
			ss.finishing = nil
		}
	}
	ss.divide()
}

// First returns the topic and the channel of a source, for display.
func (ss *Sources) First() (topic, channel string) {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	for _, src := range ss.all {
		if src != nil {
			return src.is.Topic, src.is.Channel
		}
	}
	return "", ""
}

// Take adds messages of one source to out. If other sources may have messages, it notifies the driver
// again. A connection does not end with a subscription, so Take returns true until Close.
func (ss *Sources) Take(out *broker.Outgoing, limit int) (open bool) {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if out.Messages() == 0 {
		ss.taken = nil
	}
	ss.client.UseTime(clock.Wall()) // expired messages are not sent
	encoder := out.Encoder
	defer func() { out.Encoder = encoder }()
	again := false
	for range ss.all {
		number := ss.next % len(ss.all)
		src := ss.all[number]
		if src == nil || !src.pending.Load() {
			ss.next = number + 1
			continue
		}
		if again = ss.taken != nil && ss.taken != src; again { // Wrote is for one source
			break
		}
		if ss.client.windowOpen() == 0 {
			return true // FinishBatch notifies the driver
		}
		src.pending.Store(false)
		ss.next = number + 1
		ss.take(src, out, limit)
	}
	if again {
		ss.client.conn.Notify()
	}
	return !ss.closed
}

// take adds messages of src to out. Requires: mu held.
func (ss *Sources) take(src *source, out *broker.Outgoing, limit int) {
	ss.follow(src)
	before := out.Messages()
	out.Encoder = src
	switch open := src.sub.Take(out, limit); {
	case open || src.ended:
	case src.others != nil: // the control plane does not know the topic
		src.ended = true
		time.AfterFunc(reopenAfter, ss.client.refresh)
	default:
		src.ended = true
		ss.client.refresh()
	}
	if out.Messages() > before {
		ss.taken = src
	}
	if len(out.Frames) >= limit {
		src.pending.Store(true)
	}
	src.dropped = ss.finish(src, src.dropped)
	for _, id := range src.blocked {
		_ = src.sub.Requeue(id, 0) // an error means that the message has timed out
	}
	src.blocked = src.blocked[:0]
}

// finish finishes messages and returns the empty list. Requires: mu held.
func (ss *Sources) finish(src *source, ids []wire.MessageID) []wire.MessageID {
	if len(ids) > 0 {
		ss.scratch = src.sub.FinishBatch(ss.client.server.now(), ids, ss.scratch[:0])
		clear(ss.scratch)
	}
	return ids[:0]
}

// Wrote records that the messages of the last Take are on the socket, and finishes the messages with
// QoS 0.
func (ss *Sources) Wrote(out *broker.Outgoing) {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if ss.taken == nil {
		return // the source is closed
	}
	ss.taken.sub.Wrote(out)
	ss.taken.once = ss.finish(ss.taken, ss.taken.once)
}

// Holds returns the sums over the sources.
func (ss *Sources) Holds() (ready, inFlight int) {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	for _, src := range ss.all {
		if src != nil {
			r, n := src.sub.Holds()
			ready, inFlight = ready+r, inFlight+n
		}
	}
	return ready, inFlight
}

// Finishing reports whether the next FinishBatch is for the source of that number. With false, the
// caller must call FinishBatch for its collected messages, and repeat the call.
func (ss *Sources) Finishing(number uint16, collected bool) bool {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	var src *source
	if int(number) < len(ss.all) {
		src = ss.all[number]
	}
	if collected && src != ss.finishing {
		return false
	}
	ss.finishing = src
	return true
}

// FinishBatch finishes messages of the source that Finishing has set.
func (ss *Sources) FinishBatch(now mono.Time, batch []wire.MessageID, errs []error) []error {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if ss.finishing != nil {
		errs = ss.finishing.sub.FinishBatch(now, batch, errs)
	} else { // the source is closed
		for range batch {
			errs = append(errs, broker.ErrGone)
		}
	}
	if slices.ContainsFunc(ss.all, func(src *source) bool { return src != nil && src.pending.Load() }) {
		ss.client.conn.Notify() // the window has room again
	}
	return errs
}

// Close closes all sources. Take returns false afterwards.
func (ss *Sources) Close() {
	ss.retain(func(string, string) bool { return false })
	ss.mu.Lock()
	ss.closed = true
	ss.mu.Unlock()
}

// Pauses before a repetition.
const (
	reopenAfter = time.Second // to open a client's sources after a failure
	claimAfter  = time.Minute // to claim a channel

	// To relay a topic that only this broker knows. The pause doubles, because the control plane may never know
	// the topic.
	relayAfter, maxRelayAfter = 5 * time.Second, 5 * time.Minute
)
