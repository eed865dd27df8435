package controller

import (
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/bidi"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/shareproto"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/reconcile"
	"github.com/srtm-io/srtm/loaddistributor/reports"
)

// messageQueue bounds what waits to be written to one broker: a few messages
// for each of its topics.
const messageQueue = 100_000

// Session is one broker's membership.
type Session struct {
	// Set once.
	broker, instance, remote string
	canSeek                  bool
	durability               catalog.Durability
	out                      *bidi.Queue[*srtmv1.ControllerMessage]

	// Guarded by Controller.mu.
	requests map[uint64]*request
	seeks    map[uint64]chan<- *srtmv1.SeekResult // not answered yet; room for the one answer
	reports  *reports.Broker
	// Those of its hello that the catalog did not know, nor knows of as deleted.
	unknown map[string]bool
	// Those of its hello that it has not been prepared for since, until which it releases
	// nothing, whatever its share; those that it does not list any more; and those that were
	// created there since without being prepared.
	unprepared map[string]bool
	// Of the unknown ones, what the broker keeps of them, once it has said so; without a
	// topic: nothing.
	kept map[string]kept
	// Topics whose arrivals the tuner has asked for where they are recorded already, and
	// whether the record has begun anew.
	fitted map[string]bool
	// The version of the catalog that had no work for it; 0: it had some.
	done uint64
	// Its ports have accepted connections from here.
	vouched bool
}

// request is a PrepareTopic, RemoveTopic or TakeOver that is not answered yet.
type request struct {
	topic  string
	remove bool
	// Only the owner that waits is concerned: a refusal is an answer like another.
	owners bool
	sent   time.Time
	// For the owner that waits; room for the one answer. nil: none waits.
	done chan<- reconcile.Answered
}

// Out is what is to be sent to the broker; when it ends, so does the session.
func (s *Session) Out() *bidi.Queue[*srtmv1.ControllerMessage] { return s.out }

// Join begins a session, ErrRemoved: not before it has given up what it holds. One that the broker has already ends with ErrReplaced.
// remote is the address that the broker calls from.
func (c *Controller) Join(h *srtmv1.BrokerHello, remote string) (*Session, error) {
	if err := c.mu.following(); err != nil {
		return nil, err
	}
	s := &Session{
		broker: h.BrokerId, instance: h.Instance, remote: remote, canSeek: h.Seeks,
		out:      bidi.NewQueue[*srtmv1.ControllerMessage](messageQueue),
		requests: map[uint64]*request{},
		seeks:    map[uint64]chan<- *srtmv1.SeekResult{},
		reports:  reports.NewBroker(c.cfg.ReportInterval, c.cfg.Window, h.Topics...),
		unknown:  map[string]bool{},
		kept:     map[string]kept{},
		fitted:   map[string]bool{},

		unprepared: map[string]bool{},
	}
	for _, name := range h.Topics {
		s.unprepared[name] = true
	}
	s.durability, _ = Durabilities.Value(h.Durability)
	s.out.Put(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Hello{Hello: &srtmv1.ControllerHello{
		GrantAddress: c.cfg.GrantAddress, ReportInterval: durationpb.New(c.cfg.ReportInterval), ReportChanges: true,
	}}})

	c.mu.Lock()
	if c.mu.closing {
		c.mu.Unlock()
		return nil, ErrClosing
	}
	if c.mu.next.Removed(h.BrokerId) && !h.Anew {
		c.mu.Unlock()
		return nil, ErrRemoved
	}
	_, err := c.mu.stage(catalog.BrokerJoined{
		ID: h.BrokerId, Instance: h.Instance, TCPAddress: h.TcpAddress, HTTPAddress: h.HttpAddress,
		Hostname: h.Hostname, Version: h.Version, Mcap: h.Mcap,
	})
	if err != nil {
		c.mu.Unlock()
		return nil, err
	}
	if c.mu.settled.IsZero() {
		c.mu.settled = time.Now().Add(c.cfg.Grace)
	}
	for _, name := range h.Topics {
		if _, known := c.mu.next.Topic(name); !known && !c.mu.next.LeftOn(name, h.BrokerId) {
			s.unknown[name] = true
		}
	}
	if old := c.mu.sessions[s.broker]; old != nil {
		old.end(ErrReplaced)
	}
	unknown := slices.Sorted(maps.Keys(s.unknown))
	delete(c.mu.left, s.broker)
	c.witness.vouch(s, h.TcpAddress, h.HttpAddress)
	s.recall()
	c.mu.sessions[s.broker] = s // its work is assigned when it is seen to have joined
	c.mu.Unlock()
	c.cfg.Log.Info("broker joined", obs.KeyBroker, s.broker, obs.KeyInstance, s.instance,
		obs.KeyAddress, h.TcpAddress, "mcap", h.Mcap, "topics", len(h.Topics))
	if len(unknown) > 0 {
		c.cfg.Log.Warn("a broker holds topics that this loaddistributor does not know: they are not of this cluster, or the store was lost or is not the one it was",
			obs.KeyBroker, s.broker, obs.KeyCount, len(unknown), "first", unknown[0])
	}
	return s, nil
}

// Leave ends a session; harmless for one that was replaced.
func (c *Controller) Leave(s *Session) {
	c.mu.Lock()
	if c.mu.sessions[s.broker] != s {
		c.mu.Unlock()
		return
	}
	delete(c.mu.sessions, s.broker)
	c.mu.left[s.broker] = true
	s.end(ErrBrokerGone)
	c.witness.examine(s)
	_, err := c.mu.stage(catalog.BrokerLeft{ID: s.broker})
	c.mu.Unlock()
	_ = must("a session without a broker in the catalog", err) // the next controller finds it gone
	c.cfg.Log.Info("broker left", obs.KeyBroker, s.broker, obs.KeyInstance, s.instance)
}

// end fails what the session still owes.
func (s *Session) end(cause error) {
	s.out.End(cause)
	for _, number := range slices.Sorted(maps.Keys(s.requests)) {
		s.requests[number].answer(s.broker, ErrBrokerGone)
	}
	clear(s.requests)
	for number, done := range s.seeks {
		done <- failedSeek(ErrBrokerGone)
		delete(s.seeks, number)
	}
}

// answer never blocks: done has room.
func (r *request) answer(broker string, err error) {
	if r.done != nil {
		r.done <- reconcile.Answered{Broker: broker, Err: err}
	}
}

// Handle takes a message of the broker; an error ends the session.
func (c *Controller) Handle(s *Session, m *srtmv1.BrokerMessage) error {
	now := time.Now()
	switch m := m.Message.(type) {
	case *srtmv1.BrokerMessage_PrepareResult:
		var refused *request
		err := c.mu.lockedFor(s, func() (err error) { refused, err = c.mu.result(s, m.PrepareResult, now); return err })
		if refused != nil {
			c.cfg.Log.Warn("broker refused", obs.KeyBroker, s.broker, obs.KeyTopic, refused.topic,
				"remove", refused.remove, obs.KeyError, &RefusedError{m.PrepareResult.Error})
		}
		return err
	case *srtmv1.BrokerMessage_Report:
		if err := reports.Check(m.Report); err != nil {
			return err
		}
		return c.mu.lockedFor(s, func() error { return c.mu.report(s, m.Report, now) })
	case *srtmv1.BrokerMessage_Arrivals:
		return c.mu.lockedFor(s, func() error { c.tuning.measure(s, m.Arrivals, now); return nil })
	case *srtmv1.BrokerMessage_Records:
		parsed := c.readRecords(s, m.Records)
		return c.mu.lockedFor(s, func() error { c.mu.keep(s, parsed); return nil })
	case *srtmv1.BrokerMessage_SeekResult:
		return c.mu.lockedFor(s, func() error { s.sought(m.SeekResult); return nil })
	case *srtmv1.BrokerMessage_Hello:
		return &BadMessage{Field: "hello", Problem: "a session has one hello"}
	}
	return nil // of a later version, which must not count on us
}

// lockedFor calls f with the lock held, if the session is its broker's.
func (st *state) lockedFor(s *Session, f func() error) error {
	st.Lock()
	defer st.Unlock()
	if st.sessions[s.broker] != s {
		return ErrReplaced
	}
	return f()
}

// result takes a broker's answer. refused is what it does not do, unless who asked decides
// what follows.
func (st *state) result(s *Session, p *srtmv1.PrepareResult, now time.Time) (refused *request, err error) {
	r := s.requests[p.Request]
	switch {
	case r == nil && p.Request > st.requests:
		return nil, &BadMessage{Field: "prepare_result.request", Problem: fmt.Sprintf("%d was never asked", p.Request)}
	case r == nil:
		return nil, nil // late: it has been asked again
	case p.Error != "":
		r.answer(s.broker, &RefusedError{p.Error})
	default:
		r.answer(s.broker, nil)
	}
	if p.Error != "" && !r.owners {
		r.done, r.sent = nil, now // it stays, so that what is refused is not asked again at once
		return r, nil
	}
	delete(s.requests, p.Request)
	if r.owners {
		return nil, nil
	}
	delete(s.unprepared, r.topic)
	switch {
	case r.remove:
		_, err = st.stage(catalog.LeftoverRemoved{Topic: r.topic, Broker: s.broker})
	case st.next.Expects(r.topic, s.broker):
		_, err = st.stage(catalog.MemberPrepared{Topic: r.topic, Broker: s.broker})
	}
	return nil, must("result of a connected member refused", err)
}

// report takes what a broker says of its topics.
func (st *state) report(s *Session, r *srtmv1.BrokerReport, now time.Time) error {
	news, err := s.reports.Take(r, now, func(topic string) bool { return st.next.Holds(topic, s.broker) })
	if err != nil {
		return err
	}
	for _, name := range news.Gone {
		if delete(s.unprepared, name); st.next.Expects(name, s.broker) {
			s.unprepared[name] = true
		}
	}
	for _, name := range news.Unprepared {
		s.unprepared[name] = true
	}
	for _, name := range news.Busy {
		st.wakeTopic(name)
	}
	return nil
}

// reported is what a broker has reported; on a follower nothing.
func (b *brokers) reported(id string) *reports.Broker {
	if s := b.sessions[id]; s != nil {
		return s.reports
	}
	return &reports.Broker{}
}

// durability is that of the brokers; "": they differ, or there are none.
func (b *brokers) durability() catalog.Durability {
	var of catalog.Durability
	first := true
	// order: all are to be the same
	for _, s := range b.sessions {
		if !first && s.durability != of {
			return ""
		}
		of, first = s.durability, false
	}
	return of
}

// assignWork asks every broker for what it should have done and is not known
// to have.
func (c *Controller) assignWork(now time.Time) {
	c.mu.RLock()
	sessions := slices.Collect(maps.Values(c.mu.sessions))
	c.mu.RUnlock()
	for _, s := range sessions {
		c.mu.Lock()
		if c.mu.sessions[s.broker] == s {
			c.mu.assign(s, now)
		}
		c.mu.Unlock()
	}
}

// assign asks for what is not asked already; an answer that is overdue is asked for again.
func (st *state) assign(s *Session, now time.Time) {
	if s.done == st.cat.Version() && len(s.requests)+len(s.unprepared) == 0 {
		return
	}
	type work struct {
		topic  string
		remove bool
	}
	asked := map[work]bool{}
	for number, r := range s.requests {
		if now.Sub(r.sent) < st.cfg.PrepareTimeout {
			asked[work{r.topic, r.remove}] = true
		} else {
			r.answer(s.broker, ErrNoAnswer)
			delete(s.requests, number)
		}
	}
	remove, prepare := st.cat.Work(s.broker)
	if s.done = 0; len(remove)+len(prepare) == 0 {
		s.done = st.cat.Version()
	}
	for _, name := range remove {
		if !asked[work{name, true}] && !st.owned(name) {
			st.remove(s, name, false, nil, now)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(s.unprepared)) {
		topic, known := st.cat.Topic(name)
		if !known || st.owned(name) || slices.Contains(prepare, name) {
			continue
		}
		// It retires, and has to deliver what it has; or it gave up what another took over, or
		// its topic was created there anew.
		if s.reports.Has(name) && slices.Contains(topic.Retiring, s.broker) || st.next.Expects(name, s.broker) {
			prepare = append(prepare, name)
		}
	}
	for _, name := range prepare {
		if topic, _ := st.cat.Topic(name); !asked[work{name, false}] {
			st.ask(s, name, topic.Spec, nil, now)
		}
	}
}

// expect numbers a request, which waits for its answer from then on.
func (b *brokers) expect(s *Session, r request) (number uint64) {
	b.requests++
	s.requests[b.requests] = &r
	return b.requests
}

// ask sends a PrepareTopic. done gets the answer, or ErrBrokerGone; nil if no owner waits.
func (st *state) ask(s *Session, topic string, prepare *catalog.Spec, done chan<- reconcile.Answered, now time.Time) {
	contract := ContractProto(prepare)
	order := &srtmv1.PrepareTopic{
		Request: st.expect(s, request{topic: topic, sent: now, done: done}), Topic: topic, Channels: prepare.Channels,
		Slo: contract.Slo, OverLimit: contract.OverLimit,
		Pacing: Pacings.Number(prepare.Pacing), Durability: Durabilities.Number(prepare.Durability),
	}
	for _, g := range prepare.Weighted() {
		order.Weights = append(order.Weights, &srtmv1.PublisherGroup{Key: g.Name(), Count: int32(g.Count), Weight: uint32(g.Weight)})
	}
	if is, _ := st.next.Topic(topic); is.Created > 0 {
		order.Identity = &srtmv1.TopicIdentity{Log: st.next.Log(), Created: is.Created}
		order.DeletedBefore = st.next.LeftOn(topic, s.broker)
	}
	order.Record = st.text(st.next, topic)
	s.out.Put(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Prepare{Prepare: order}})
}

// remove sends a RemoveTopic, as ask does; unused: only if the topic is not used.
func (b *brokers) remove(s *Session, topic string, unused bool, done chan<- reconcile.Answered, now time.Time) {
	s.out.Put(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Remove{Remove: &srtmv1.RemoveTopic{
		Request: b.expect(s, request{topic: topic, remove: true, owners: unused, sent: now, done: done}), Topic: topic, IfUnused: unused,
	}}})
}

// Values of the API's enumerations.
var (
	OverLimits = shareproto.Enum[srtmv1.OverLimitPolicy, catalog.OverLimit]{
		srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_UNSPECIFIED: catalog.Delay,
		srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_DELAY:       catalog.Delay,
		srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_REJECT:      catalog.Reject,
	}
	Durabilities = shareproto.Enum[srtmv1.Durability, catalog.Durability]{
		srtmv1.Durability_DURABILITY_UNSPECIFIED: "",
		srtmv1.Durability_DURABILITY_MEMORY:      catalog.DurabilityMemory,
		srtmv1.Durability_DURABILITY_FSYNC:       catalog.DurabilityFsync,
		srtmv1.Durability_DURABILITY_REPLICATED:  catalog.DurabilityReplicated,
	}
	Pacings = shareproto.Enum[srtmv1.PacingMode, catalog.Pacing]{
		srtmv1.PacingMode_PACING_MODE_UNSPECIFIED: "",
		srtmv1.PacingMode_PACING_MODE_OFF:         catalog.PacingOff,
		srtmv1.PacingMode_PACING_MODE_ADVISE:      catalog.PacingAdvise,
		srtmv1.PacingMode_PACING_MODE_POLICE:      catalog.PacingPolice,
	}
)

// HostPort splits an address that others dial.
func HostPort(address string) (host string, port int, err error) {
	host, text, err := net.SplitHostPort(address)
	if err != nil || host == "" || len(address) > 300 {
		return "", 0, fmt.Errorf("%.300q: want host:port", address)
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 {
		return "", 0, fmt.Errorf("%.300q: want a port of 1 to 65535", address)
	}
	return host, int(n), nil
}
