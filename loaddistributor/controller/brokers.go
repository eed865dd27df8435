package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/identity"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/reconcile"
	"github.com/srtm-io/srtm/loaddistributor/reports"
)

// brokers holds data about brokers beside the catalog, by id. The controller's lock guards
// brokers, and the caller of a method holds the lock.
type brokers struct {
	cfg               *Config // set once
	sessions          map[string]*Session
	holders           map[string]*holder   // processes that own the ids
	lastRequest       uint64               // number of the last request
	sessionEnded      map[string]bool      // brokers whose session here has ended
	disconnectedSince map[string]time.Time // disconnected brokers, since when
	drainers          map[string]string    // who requested the drain; unknown before this process led
	removing          map[string]bool      // brokers that RemoveBroker is removing
}

// Calibrate sets a broker's mcap, msg/s, overriding the mcap in the broker's hello. 0
// removes the override. Error: catalog.ErrBrokerUnknown.
func (c *Controller) Calibrate(id string, mcap int64) (catalog.Broker, error) {
	return c.setBroker(id, catalog.BrokerCalibrated{ID: id, Mcap: mcap}, nil)
}

// setBroker commits an event of a broker and returns the broker. If noted is not nil,
// setBroker calls it with the lock held, before the event is committed.
func (c *Controller) setBroker(id string, e catalog.Event, noted func()) (catalog.Broker, error) {
	if err := c.knowledge.following(); err != nil {
		return catalog.Broker{}, err
	}
	c.mu.Lock()
	t, err := c.cat.stage(e)
	if err == nil && noted != nil {
		noted()
	}
	c.mu.Unlock()
	if err == nil {
		err = t.wait()
	}
	if err != nil {
		return catalog.Broker{}, err
	}
	c.mu.RLock()
	defer c.mu.RUnlock()
	b, _ := c.cat.committed.Broker(id)
	return b, nil
}

// Drain starts or ends the drain of a broker: no topic is placed on a draining broker,
// and its topics move away, if forced at any cost (srtmv1.DrainBrokerRequest). Drain
// returns at once. Error: catalog.ErrBrokerUnknown.
func (c *Controller) Drain(ctx context.Context, id string, drain, forced bool) (catalog.Broker, error) {
	e := catalog.BrokerDraining{ID: id, Draining: drain, Forced: forced}
	return c.setBroker(id, e, func() { c.brokers.drainers[id] = secure.Caller(ctx) })
}

// RemoveBroker removes a broker from the cluster. The caller confirms that the broker is
// dead. The broker may join anew later. RemoveBroker returns the freed shares and the
// topics whose messages may be lost. Errors: catalog.ErrBrokerUnknown,
// ErrBrokerConnected, ErrBrokerInUse; ErrRemoving; *AdaptorError.
func (c *Controller) RemoveBroker(ctx context.Context, id string) (freed []*srtmv1.FreedShare, remaining []string, err error) {
	if err := c.knowledge.following(); err != nil {
		return nil, nil, err
	}
	c.mu.Lock()
	if c.life.closing {
		c.mu.Unlock()
		return nil, nil, ErrClosing
	}
	if c.brokers.removing[id] {
		c.mu.Unlock()
		return nil, nil, fmt.Errorf("remove broker %q: %w", id, ErrRemoving)
	}
	c.brokers.removing[id] = true // prevents the broker from joining meanwhile
	defer func() {
		c.mu.Lock()
		delete(c.brokers.removing, id)
		c.mu.Unlock()
	}()
	c.life.work.Add(1)
	defer c.life.work.Done()
	b, found := c.cat.next.Broker(id)
	var placed []string
	for _, name := range c.cat.next.Placed(id) {
		if topic, _ := c.cat.next.Topic(name); slices.Contains(topic.Retiring, id) {
			remaining = append(remaining, name)
		} else {
			placed = append(placed, name)
		}
	}
	c.mu.Unlock()
	switch {
	case !found:
		err = catalog.ErrBrokerUnknown
	case b.Connected:
		err = catalog.ErrBrokerConnected
	case placed != nil:
		err = fmt.Errorf("%w: %s", catalog.ErrBrokerInUse, strings.Join(placed, ", "))
	}
	if err != nil {
		return nil, nil, fmt.Errorf("remove broker %q: %w", id, err)
	}
	limit, cancel := context.WithTimeout(ctx, c.cfg.PrepareTimeout)
	defer cancel()
	freed, err = c.adaptor.Forget(limit, id)
	switch status.Code(err) {
	case codes.OK, codes.NotFound:
	case codes.FailedPrecondition:
		return nil, nil, fmt.Errorf("remove broker %q: %w to the adaptor", id, catalog.ErrBrokerConnected)
	default:
		return nil, nil, &AdaptorError{err}
	}
	for _, name := range remaining {
		// A topic deleted meanwhile is left alone.
		op := operation{name: name, target: reconcile.Target{Retire: id, Dead: true}}
		if err := c.owners.request(ctx, op); err != nil {
			return nil, nil, err
		}
	}
	if err := c.cat.commit(catalog.BrokerRemoved{ID: id}); err != nil {
		return nil, nil, err
	}
	c.mu.Lock()
	delete(c.brokers.holders, id) // the operator confirms that the process has ended
	c.mu.Unlock()
	c.cfg.Log.Warn("broker removed by an operator", obs.KeyBroker, id, "topics", len(remaining))
	return freed, remaining, nil
}

// messageQueue limits the messages waiting for one broker: a few for each of its topics.
const messageQueue = 100_000

// Session is a broker's membership in the cluster.
type Session struct {
	// Set once.
	broker, remote string
	hello          mono.Stamp // stamp of the hello, and its process
	place          identity.Place
	canSeek        bool
	fresh          bool // never in a cluster before
	durability     catalog.Durability
	out            *service.Queue[*srtmv1.ControllerMessage]

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
	// copies holds the broker's copies of unknown topics, as far as received. An entry
	// without a topic means no copy.
	copies map[string]copiedTopic
	// recordings holds topics whose arrivals the tuner has requested.
	recordings map[string]*recording
	// idleVersion is a version of the catalog without work for the broker; 0: none.
	idleVersion uint64
	// reachable means that the broker's ports have accepted connections from here.
	reachable bool
}

// Out is the queue of messages to the broker. The session ends with the queue.
func (s *Session) Out() *service.Queue[*srtmv1.ControllerMessage] { return s.out }

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
		hello:      mono.Stamp{Process: h.Instance, At: mono.Time(h.Stamp)},
		place:      PlaceOf(h),
		out:        service.NewQueue[*srtmv1.ControllerMessage](messageQueue),
		requests:   map[uint64]*request{},
		seeks:      map[uint64]chan<- *srtmv1.SeekResult{},
		reports:    reports.NewBroker(c.cfg.ReportInterval, c.cfg.Window, h.Topics...),
		unknown:    map[string]bool{},
		unprepared: map[string]bool{},
		copies:     map[string]copiedTopic{},
		recordings: map[string]*recording{},
	}
	s.durability, _ = Durabilities.Value(h.Durability)
	s.out.Put(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Hello{Hello: &srtmv1.ControllerHello{
		GrantAddress: c.cfg.GrantAddress, ReportInterval: durationpb.New(c.cfg.ReportInterval), ReportChanges: true, ForwardKey: c.cfg.ForwardKey,
	}}})
	c.mu.RLock()
	previous := ""
	if h := c.brokers.holders[s.broker]; h != nil {
		previous = h.refused.instance
	}
	c.mu.RUnlock()
	unknown, err := c.enter(s, h)
	if err != nil {
		c.logRefusal(s, err, previous)
		return nil, err
	}
	c.cfg.Log.Info("broker joined", obs.KeyBroker, s.broker, obs.KeyInstance, s.hello.Process,
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
		ID: h.BrokerId, Instance: h.Instance, TCPAddress: h.TcpAddress, HTTPAddress: h.HttpAddress, MQTTAddress: h.MqttAddress, MQTTSAddress: h.MqttsAddress,
		Hostname: h.Hostname, Version: h.Version, Mcap: h.Mcap, Folder: h.DataPath, Lock: h.Lock,
	}); err != nil {
		return nil, err
	}
	if c.knowledge.settled.IsZero() {
		c.knowledge.settled = time.Now().Add(c.cfg.Grace)
	}
	for _, name := range h.Topics {
		s.unprepared[name] = true
		if _, found := c.cat.next.Topic(name); !found && !c.cat.next.LeftOn(name, h.BrokerId) {
			s.unknown[name] = true
		}
	}
	c.brokers.takeOwnership(s)
	if old := c.brokers.sessions[s.broker]; old != nil {
		old.end(ErrReplaced)
	}
	for _, name := range c.topics.busy { // the records ended with the previous session
		if live := c.topics.peek(name).learned; live != nil {
			live.Ended(s.broker)
		}
	}
	delete(c.brokers.sessionEnded, s.broker)
	c.witness.vouch(s, h.TcpAddress, h.HttpAddress)
	s.recall()
	c.brokers.sessions[s.broker] = s // work is assigned when the join is committed
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
	c.brokers.sessionEnded[s.broker] = true
	s.end(ErrBrokerGone)
	c.witness.examine(s)
	_, err := c.cat.stage(catalog.BrokerLeft{ID: s.broker})
	c.mu.Unlock()
	_ = mustSucceed("a session without a broker in the catalog", err) // the next controller finds the broker gone
	c.cfg.Log.Info("broker left", obs.KeyBroker, s.broker, obs.KeyInstance, s.hello.Process)
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
		return c.lockedFor(s, func() error {
			if m.Arrivals.Topic != "" {
				c.tuning.measure(s, m.Arrivals, now)
			}
			for _, topic := range m.Arrivals.Quiet {
				c.tuning.measure(s, &srtmv1.Arrivals{Topic: topic}, now)
			}
			return nil
		})
	case *srtmv1.BrokerMessage_Records:
		parsed := readRecords(c.cfg.Log, s, m.Records)
		return c.lockedFor(s, func() error { c.copies.storeCopies(s, parsed); return nil })
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
	c.brokers.markAlive(s)
	return f()
}

// report handles a broker's report.
func (c *Controller) report(s *Session, r *srtmv1.BrokerReport, now time.Time) error {
	news, err := s.reports.Apply(r, now, func(topic string) bool { return c.cat.next.Holds(topic, s.broker) })
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
	var offered catalog.Durability
	first := true
	// order: all must be equal
	for _, s := range b.sessions {
		if !first && s.durability != offered {
			return ""
		}
		offered, first = s.durability, false
	}
	return offered
}

// maxWaits limits the topics named by DrainWaits.
const maxWaits = 100

// DrainWaits returns the reasons why the drain of a broker is not complete, by topic, and
// whether the broker is safe to stop. For a broker that does not drain, and on a
// follower, both are zero.
func (r *View) DrainWaits(id string) (waits []*srtmv1.DrainWait, safe bool) {
	now := time.Now()
	r.mu.RLock()
	defer r.mu.RUnlock()
	b, _ := r.cat.committed.Broker(id)
	if !b.Draining || r.knowledge.leader != nil {
		return nil, false
	}
	wait := func(topic, reason, remedy string) {
		waits = append(waits, &srtmv1.DrainWait{Topic: topic, Reason: reason, Remedy: remedy})
	}
	for _, name := range r.cat.committed.Placed(id) {
		if len(waits) == maxWaits {
			return waits, false
		}
		topic, _ := r.cat.committed.Topic(name)
		if slices.Contains(topic.Retiring, id) {
			reason, remedy := r.leftOn(topic, b, now)
			wait(name, reason, remedy)
			continue
		}
		l := r.topics.peek(name)
		switch owner, stays := l.owner, l.moveErr; {
		case !topic.Open():
			wait(name, "the topic is "+topic.State.String(), "")
		case owner != nil && owner.waiting != "":
			wait(name, owner.waiting, "")
		case owner != nil || stays == nil:
			wait(name, "its publishers are being moved", "")
		case errors.As(stays, new(*placement.Infeasible)) && !b.Forced:
			wait(name, "its publishers fit nowhere else: "+stays.Error(), "add a broker, give one more capacity (srtm broker capacity), lower the topic's rate, or --force")
		case errors.As(stays, new(*placement.Infeasible)):
			wait(name, "its publishers fit nowhere else: "+stays.Error(), "add a broker, or update the topic")
		default:
			wait(name, fmt.Sprintf("it could not be moved, and is tried again within %v: %v", moveRetry, stays), "")
		}
	}
	for _, name := range r.alien(id) {
		if len(waits) == maxWaits {
			return waits, false
		}
		reason, remedy := "the loaddistributor did not place it here, and it is in use", "end its publishers and consumers, or have them use another broker"
		last := r.brokers.reported(id).Topic(name).Newest().Stats
		messages := last.Depth + last.Backlog
		if messages > 0 {
			reason += "; consumers have not finished " + plural.Count(messages, "message")
			remedy += "; connect consumers to the broker's own address, or empty its channels there"
		}
		if r.cat.committed.Keeps(name, id) {
			reason = "its creation failed after the broker had acknowledged " + plural.Count(messages, "message")
			remedy = "create it, and consumers get the messages; --force to lose them"
		}
		wait(name, reason, remedy)
	}
	switch s := r.brokers.sessions[id]; {
	case len(waits) > 0:
	case !r.cat.committed.Empty(id) && !b.Connected:
		wait("", "it is disconnected, and may have topics that were deleted, or messages of topics whose creation failed", "")
	case !r.cat.committed.Empty(id):
		wait("", "deleted topics are being removed from it", "")
	case r.retires(id):
		wait("", "its shares are being given to others", "")
	case s != nil && s.reports.Count() == 0:
		wait("", "its first report is due", "")
	}
	return waits, len(waits) == 0
}

// leftOn describes what is left of a topic on a broker that it has moved away from, and
// the remedy.
func (r *View) leftOn(topic catalog.Topic, b catalog.Broker, now time.Time) (reason, remedy string) {
	name := topic.Spec.Name()
	if !b.Connected {
		return "the broker is disconnected, and may have messages that no consumer has received", "start the broker again, or `srtm broker remove " + b.ID + "` if the broker will not return: its messages are lost then"
	}
	t := r.brokers.reported(b.ID).Topic(name)
	if t == nil {
		return "it is being removed", ""
	}
	last := t.Newest().Stats
	messages := last.Depth + last.Backlog
	var parts, remedies []string
	if last.Publishers > 0 || last.Offered > 0 {
		parts = append(parts, fmt.Sprintf("the broker still has %s, and its last report has %s", plural.Count(last.Publishers, "publishing connection"), plural.Count(last.Offered, "new message")))
		remedies = append(remedies, "end the publishers that are not in the topic's list, or add them to the list")
	}
	if messages > 0 {
		parts = append(parts, fmt.Sprintf("consumers have not finished %s; connected: %s", plural.Count(messages, "message"), plural.Count(last.Subscribers, "consumer")))
		switch {
		case last.Subscribers > 0:
		case len(t.Channels) == 0:
			remedies = append(remedies, "connect a consumer: the topic has no channel")
		default:
			remedies = append(remedies, fmt.Sprintf("connect consumers to its channels (%s), or empty these", strings.Join(reconcile.FirstFew(t.Channels), ", ")))
		}
		if paused := pausedChannels(topic, t.Channels); len(paused) > 0 {
			remedies = append(remedies, fmt.Sprintf("unpause its paused channels (%s)", strings.Join(reconcile.FirstFew(paused), ", ")))
		}
		switch {
		case !b.Forced:
			remedies = append(remedies, "--force to lose what no consumer takes")
		case !r.brokers.untaken(name, b, now):
			parts = append(parts, fmt.Sprintf("they are lost after %v in which no client publishes and no consumer is given one", r.cfg.Window))
		}
	}
	if len(parts) == 0 {
		return "it is empty, and is being removed", ""
	}
	return strings.Join(parts, "; "), strings.Join(remedies, "; ")
}

// pausedChannels returns the names of the topic's paused channels, out of the given names.
func pausedChannels(topic catalog.Topic, names []string) (paused []string) {
	for _, c := range topic.Channels {
		if c.Paused && slices.Contains(names, c.Name) {
			paused = append(paused, c.Name)
		}
	}
	return paused
}

// retires reports whether a topic is being retired from the broker.
func (r *View) retires(id string) bool {
	for _, l := range r.topics.byName {
		if l.owner != nil && l.owner.retiring == id {
			return true
		}
	}
	return false
}

// alien returns, by name, the topics in use on a broker that the catalog does not have on that broker.
func (r *View) alien(id string) []string {
	var names []string
	for name, t := range r.brokers.reported(id).Topics() {
		if t.Used && !r.cat.committed.Holds(name, id) && !r.cat.committed.IsListed(name, id) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// untaken reports whether the rest of a topic on a broker that drains by force must be
// given up.
func (bs *brokers) untaken(topic string, b catalog.Broker, now time.Time) bool {
	t := bs.reported(b.ID).Topic(topic)
	return b.Forced && t != nil && !t.Untaken.IsZero() && now.Sub(t.Untaken) >= bs.cfg.Window-2*bs.cfg.ReportInterval &&
		now.Sub(t.LastReport()) <= bs.cfg.Window // else the broker's state is unknown
}

// logLost logs the messages that a broker that drains by force is about to lose.
func (bs *brokers) logLost(topic, id string) {
	if t := bs.reported(id).Topic(topic); t != nil {
		last := t.Newest().Stats
		bs.cfg.Log.Warn("messages that no consumer takes are lost with a drain by force", obs.KeyTopic, topic, obs.KeyBroker, id, obs.KeyCount, last.Depth+last.Backlog)
	}
}
