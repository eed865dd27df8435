package controller

import (
	"maps"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/bidi"
	"github.com/srtm-io/srtm/internal/identity"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/reports"
)

// messageQueue limits the messages waiting for one broker: a few for each of its topics.
const messageQueue = 100_000

// Session is a broker's membership in the cluster.
type Session struct {
	// Set once.
	broker, remote string
	said           mono.Said // stamp of the hello, and its process
	place          identity.Place
	canSeek        bool
	fresh          bool // never in a cluster before
	durability     catalog.Durability
	out            *bidi.Queue[*srtmv1.ControllerMessage]

	// Guarded by the controller's lock.
	requests map[uint64]*request
	seeks    map[uint64]chan<- *srtmv1.SeekResult // unanswered; room for the one answer
	orders   []*channelOrder                      // unanswered, oldest first
	reports  *reports.Broker
	// unknown holds topics of the hello that the catalog neither has nor knows as
	// deleted.
	unknown map[string]bool
	// unprepared holds topics that may need PrepareTopic on this broker:
	//
	//   - topics of the hello: the broker releases none of their messages before,
	//     whatever its share;
	//   - topics that the broker no longer lists;
	//   - topics that clients created on the broker directly.
	unprepared map[string]bool
	// kept holds the broker's copies of unknown topics, as far as received. An entry
	// without a topic means no copy.
	kept map[string]kept
	// fitted holds topics whose arrivals the tuner has requested.
	fitted map[string]*fitted
	// done is a version of the catalog without work for the broker; 0: none.
	done uint64
	// vouched means that the broker's ports have accepted connections from here.
	vouched bool
}

// Out is the queue of messages to the broker. The session ends with the queue.
func (s *Session) Out() *bidi.Queue[*srtmv1.ControllerMessage] { return s.out }

// Join begins a session of a broker; remote is the address from which the broker connects.
// An earlier session of the same process, or of a process that is proven to have ended, ends
// with ErrReplaced. Errors:
//
//   - ErrRemoved: the broker may join after it has given up its shares and topics;
//   - ErrRemoving: the broker may join later;
//   - identity.ErrReplaced: the process has sent a later hello;
//   - *identity.InUse, *identity.Lost: the id belongs to another process.
func (c *Controller) Join(h *srtmv1.BrokerHello, remote string) (*Session, error) {
	if err := c.knowledge.following(); err != nil {
		return nil, err
	}
	s := &Session{
		broker: h.BrokerId, remote: remote, canSeek: h.Seeks, fresh: h.Fresh,
		said:       mono.Said{Process: h.Instance, At: mono.Time(h.Stamp)},
		place:      PlaceOf(h),
		out:        bidi.NewQueue[*srtmv1.ControllerMessage](messageQueue),
		requests:   map[uint64]*request{},
		seeks:      map[uint64]chan<- *srtmv1.SeekResult{},
		reports:    reports.NewBroker(c.cfg.ReportInterval, c.cfg.Window, h.Topics...),
		unknown:    map[string]bool{},
		unprepared: map[string]bool{},
		kept:       map[string]kept{},
		fitted:     map[string]*fitted{},
	}
	s.durability, _ = Durabilities.Value(h.Durability)
	s.out.Put(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Hello{Hello: &srtmv1.ControllerHello{
		GrantAddress: c.cfg.GrantAddress, ReportInterval: durationpb.New(c.cfg.ReportInterval), ReportChanges: true, ForwardKey: c.cfg.ForwardKey,
	}}})
	c.mu.RLock()
	before := ""
	if h := c.brokers.holders[s.broker]; h != nil {
		before = h.refused.instance
	}
	c.mu.RUnlock()
	unknown, err := c.enter(s, h)
	if err != nil {
		c.logRefusal(s, err, before)
		return nil, err
	}
	c.cfg.Log.Info("broker joined", obs.KeyBroker, s.broker, obs.KeyInstance, s.said.Process,
		obs.KeyAddress, h.TcpAddress, "mcap", h.Mcap, "topics", len(h.Topics))
	if len(unknown) > 0 {
		c.cfg.Log.Warn("a broker holds topics that this loaddistributor does not know: they are not of this cluster, or the store was lost or is not the one it was",
			obs.KeyBroker, s.broker, obs.KeyCount, len(unknown), "first", unknown[0])
	}
	return s, nil
}

// enter registers a session, and returns the unknown topics of the hello.
func (c *Controller) enter(s *Session, h *srtmv1.BrokerHello) (unknown []string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.life.closing {
		return nil, ErrClosing
	}
	switch {
	case c.brokers.removing[h.BrokerId]:
		return nil, ErrRemoving
	case c.cat.next.Removed(h.BrokerId) && !h.Anew:
		return nil, ErrRemoved
	}
	if err := c.brokers.claim(s, c.cfg.IDLease); err != nil {
		return nil, err
	}
	if _, err := c.cat.stage(catalog.BrokerJoined{
		ID: h.BrokerId, Instance: h.Instance, TCPAddress: h.TcpAddress, HTTPAddress: h.HttpAddress,
		Hostname: h.Hostname, Version: h.Version, Mcap: h.Mcap, Folder: h.DataPath, Lock: h.Lock,
	}); err != nil {
		return nil, err
	}
	if c.knowledge.settled.IsZero() {
		c.knowledge.settled = time.Now().Add(c.cfg.Grace)
	}
	for _, name := range h.Topics {
		s.unprepared[name] = true
		if _, known := c.cat.next.Topic(name); !known && !c.cat.next.LeftOn(name, h.BrokerId) {
			s.unknown[name] = true
		}
	}
	c.brokers.take(s)
	if old := c.brokers.sessions[s.broker]; old != nil {
		old.end(ErrReplaced)
	}
	for _, name := range c.topics.busy { // the records ended with the previous session
		if of := c.topics.peek(name).learned; of != nil {
			of.Ended(s.broker)
		}
	}
	delete(c.brokers.left, s.broker)
	c.witness.vouch(s, h.TcpAddress, h.HttpAddress)
	s.recall()
	c.brokers.sessions[s.broker] = s // work is assigned when the join is shown
	return slices.Sorted(maps.Keys(s.unknown)), nil
}

// Leave ends a session. It has no effect on a replaced session.
func (c *Controller) Leave(s *Session) {
	c.mu.Lock()
	if c.brokers.sessions[s.broker] != s {
		c.mu.Unlock()
		return
	}
	delete(c.brokers.sessions, s.broker)
	c.brokers.left[s.broker] = true
	s.end(ErrBrokerGone)
	c.witness.examine(s)
	_, err := c.cat.stage(catalog.BrokerLeft{ID: s.broker})
	c.mu.Unlock()
	_ = must("a session without a broker in the catalog", err) // the next controller finds the broker gone
	c.cfg.Log.Info("broker left", obs.KeyBroker, s.broker, obs.KeyInstance, s.said.Process)
}

// end fails all unanswered requests of the session.
func (s *Session) end(cause error) {
	s.out.End(cause)
	for _, number := range slices.Sorted(maps.Keys(s.requests)) {
		r := s.requests[number]
		r.settle(s.broker)
		r.answer(s.broker, ErrBrokerGone)
	}
	clear(s.requests)
	for _, order := range s.orders {
		for _, w := range order.waits {
			w.settle(s.broker)
		}
	}
	s.orders = nil
	for number, done := range s.seeks {
		done <- failedSeek(ErrBrokerGone)
		delete(s.seeks, number)
	}
}

// Handle handles a message of the broker. An error ends the session.
func (c *Controller) Handle(s *Session, m *srtmv1.BrokerMessage) error {
	now := time.Now()
	switch m := m.Message.(type) {
	case *srtmv1.BrokerMessage_PrepareResult:
		var refused *request
		var left []string
		err := c.lockedFor(s, func() (err error) { refused, left, err = c.requests.result(s, m.PrepareResult, now); return err })
		if len(left) > 0 {
			c.cfg.Log.Error("a broker has more channels of a topic than a topic may have: they stay on that broker alone",
				obs.KeyBroker, s.broker, obs.KeyCount, len(left), "first", left[0])
		}
		if refused != nil {
			c.cfg.Log.Warn("broker refused", obs.KeyBroker, s.broker, obs.KeyTopic, refused.topic,
				"remove", refused.remove, obs.KeyError, &RefusedError{m.PrepareResult.Error})
		}
		return err
	case *srtmv1.BrokerMessage_Report:
		if err := reports.Check(m.Report); err != nil {
			return err
		}
		return c.lockedFor(s, func() error { return c.report(s, m.Report, now) })
	case *srtmv1.BrokerMessage_Arrivals:
		return c.lockedFor(s, func() error { c.tuning.measure(s, m.Arrivals, now); return nil })
	case *srtmv1.BrokerMessage_Records:
		parsed := readRecords(c.cfg.Log, s, m.Records)
		return c.lockedFor(s, func() error { c.copies.keep(s, parsed); return nil })
	case *srtmv1.BrokerMessage_SeekResult:
		return c.lockedFor(s, func() error { s.sought(m.SeekResult); return nil })
	case *srtmv1.BrokerMessage_ChannelRequest:
		return c.lockedFor(s, func() error { return c.channels.channelRequest(s, m.ChannelRequest) })
	case *srtmv1.BrokerMessage_ChannelsApplied:
		var faults []*srtmv1.ChannelFault
		err := c.lockedFor(s, func() (err error) { faults, err = c.channels.applied(s, m.ChannelsApplied); return err })
		for _, f := range faults {
			c.cfg.Log.Warn("broker cannot change channels; trying again", obs.KeyBroker, s.broker, obs.KeyError, &RefusedError{f.Error})
		}
		return err
	case *srtmv1.BrokerMessage_Hello:
		return &BadMessage{Field: "hello", Problem: "a session has one hello"}
	}
	return nil // from a later version, which must not depend on it
}

// lockedFor calls f with the lock held, if the session is the broker's present session.
func (c *Controller) lockedFor(s *Session, f func() error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.brokers.sessions[s.broker] != s {
		return ErrReplaced
	}
	c.brokers.hear(s)
	return f()
}

// report handles a broker's report.
func (c *Controller) report(s *Session, r *srtmv1.BrokerReport, now time.Time) error {
	news, err := s.reports.Take(r, now, func(topic string) bool { return c.cat.next.Holds(topic, s.broker) })
	if err != nil {
		return err
	}
	for _, name := range news.Gone {
		if delete(s.unprepared, name); c.cat.next.Expects(name, s.broker) {
			s.unprepared[name] = true
		}
	}
	for _, name := range news.Unprepared {
		s.unprepared[name] = true
	}
	for _, name := range news.Busy {
		c.topics.wake(name)
	}
	return nil
}

// reported returns the broker's reports; on a follower, none.
func (b *brokers) reported(id string) *reports.Broker {
	if s := b.sessions[id]; s != nil {
		return s.reports
	}
	return &reports.Broker{}
}

// durability returns the common durability of the brokers; "" if they differ or there are
// none.
func (b *brokers) durability() catalog.Durability {
	var of catalog.Durability
	first := true
	// order: all must be equal
	for _, s := range b.sessions {
		if !first && s.durability != of {
			return ""
		}
		of, first = s.durability, false
	}
	return of
}
