package controller

import (
	"fmt"
	"maps"
	"slices"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/reconcile"
)

// Requests to a broker come from the owner of a topic, which waits for the answer, or
// from a comparison: the broker lacks something that the catalog has.

// request is an unanswered PrepareTopic, RemoveTopic or TakeOver.
type request struct {
	topic  string
	remove bool
	// owners means that only the waiting owner is concerned: a refusal is a normal
	// answer.
	owners bool
	sent   time.Time
	// done receives the answer for the waiting owner; room for the one answer. nil: no
	// owner waits.
	done     chan<- reconcile.Answered
	prepares bool           // a PrepareTopic
	answered bool           // the broker has answered; the answer is not applied yet, or is a refusal
	waits    []*channelWait // for the broker's channels
}

// settle ends the waits for this broker's channels.
func (r *request) settle(broker string) {
	for _, w := range r.waits {
		w.settle(broker)
	}
	r.waits = nil
}

// answer sends the answer to the owner. It never blocks: done has room.
func (r *request) answer(broker string, err error) {
	if r.done != nil {
		r.done <- reconcile.Answered{Broker: broker, Err: err}
	}
}

// requests sends requests to brokers and handles the answers. The caller of a method holds
// the controller's lock.
type requests struct {
	cfg      *Config
	cat      *pipeline
	brokers  *brokers
	topics   *topics
	channels *channels
	copies   *copies
}

// assignWork requests from every broker the work that is not known to be done.
func (c *Controller) assignWork(now time.Time) {
	c.mu.RLock()
	sessions := slices.Collect(maps.Values(c.brokers.sessions))
	c.mu.RUnlock()
	for _, s := range sessions {
		c.mu.Lock()
		if c.brokers.sessions[s.broker] == s {
			c.requests.assign(s, now)
		}
		c.mu.Unlock()
	}
}

// assign sends the missing requests, and repeats refused requests. assign does not repeat an unanswered
// request: the session keeps the order of requests, so the broker is busy with earlier requests, and a
// repetition would keep the broker busy for longer.
func (q *requests) assign(s *Session, now time.Time) {
	if s.idleVersion == q.cat.committed.Version() && len(s.requests)+len(s.unprepared) == 0 {
		return
	}
	type work struct {
		topic  string
		remove bool
	}
	requested := map[work]bool{}
	for _, number := range slices.Sorted(maps.Keys(s.requests)) {
		r := s.requests[number]
		wanted := work{r.topic, r.remove}
		if now.Sub(r.sent) >= q.cfg.PrepareTimeout {
			r.settle(s.broker)
			r.answer(s.broker, ErrNoAnswer)
			if r.done = nil; r.answered || r.owners || requested[wanted] {
				delete(s.requests, number)
				continue
			}
		}
		requested[wanted] = true
	}
	remove, prepare := q.cat.committed.Work(s.broker)
	if s.idleVersion = 0; len(remove)+len(prepare) == 0 {
		s.idleVersion = q.cat.committed.Version()
	}
	for _, name := range remove {
		_, again := q.cat.next.Topic(name)
		switch {
		case requested[work{name, true}], q.topics.owned(name), !q.cat.next.LeftOn(name, s.broker):
		case again && q.cat.next.Keeps(name, s.broker):
			s.unprepared[name] = true // what the broker keeps is part of the new topic
		default:
			q.remove(s, request{topic: name, sent: now}, false)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(s.unprepared)) {
		topic, found := q.cat.committed.Topic(name)
		if !found || q.topics.owned(name) || slices.Contains(prepare, name) {
			continue
		}
		// The broker retires and must deliver its messages; or it lost the topic to a
		// take-over; or a client created the topic on it directly.
		if s.reports.Has(name) && slices.Contains(topic.Retiring, s.broker) || q.cat.next.Expects(name, s.broker) {
			prepare = append(prepare, name)
		} else if q.found(s, topic) {
			if q.cat.next.Keeps(name, s.broker) { // as in prepare
				q.remove(s, request{topic: name, sent: now}, true)
			}
			_, err := q.cat.stage(catalog.MemberFound{Topic: name, Broker: s.broker})
			_ = mustSucceed("topic "+name+" found on broker "+s.broker, err)
			if t := s.reports.Topic(name); t != nil {
				t.Untaken = now // from now on, consumers can get the messages
			}
			q.cfg.Log.Warn("a broker has the topic and is outside its placement; the topic retires from the broker", obs.KeyTopic, name, obs.KeyBroker, s.broker)
		}
	}
	for _, name := range prepare {
		if topic, _ := q.cat.committed.Topic(name); !requested[work{name, false}] {
			q.prepare(s, request{topic: name, sent: now}, topic.Spec)
		}
	}
}

// found reports whether the broker has a topic without being one of the topic's brokers. The
// first report may name a topic that the broker is giving up. A replicated topic is found only
// if an earlier creation failed: otherwise another broker has taken over the messages.
func (q *requests) found(s *Session, topic catalog.Topic) bool {
	name := topic.Spec.Name()
	next, _ := q.cat.next.Topic(name)
	stray := next.Spec != nil && next.Spec.Durability != catalog.DurabilityReplicated && !q.cat.next.LeftOn(name, s.broker)
	return s.reports.Count() >= 2 && s.reports.Has(name) && next.Open() && next.Next == nil &&
		!q.cat.next.Holds(name, s.broker) && (stray || q.cat.next.Keeps(name, s.broker))
}

// expect numbers a request and stores it until the answer.
func (b *brokers) expect(s *Session, r request) (number uint64) {
	b.lastRequest++
	s.requests[b.lastRequest] = &r
	return b.lastRequest
}

func (q *requests) prepare(s *Session, r request, spec *catalog.Spec) {
	kept := q.cat.next.Keeps(r.topic, s.broker)
	if q.cat.next.LeftOn(r.topic, s.broker) { // answers to earlier orders are about an earlier topic
		for _, earlier := range s.requests {
			earlier.owners = earlier.owners || earlier.remove && earlier.topic == r.topic
		}
	}
	if kept { // the broker must know first that its messages are not of a deleted topic
		q.remove(s, request{topic: r.topic, sent: r.sent}, true)
	}
	contract := ContractProto(spec)
	r.prepares = true
	topic, _ := q.cat.committed.Topic(r.topic)
	order := &srtmv1.PrepareTopic{
		Request: q.brokers.expect(s, r), Topic: r.topic, Channels: channelsProto(topic.Channels), ChannelsVersion: q.cat.committed.Version(),
		Slo: contract.Slo, OverLimit: contract.OverLimit,
		Pacing: Pacings.Number(spec.Pacing), Durability: Durabilities.Number(spec.Durability),
	}
	order.Expiry, order.ChannelExpiry = service.ExpiryProto(spec.Expiry), service.ChannelExpiryProto(spec.ChannelExpiry)
	for _, g := range spec.Weighted() {
		order.Weights = append(order.Weights, &srtmv1.PublisherGroup{Key: g.Name(), Count: int32(g.Count), Weight: uint32(g.Weight)})
	}
	if topic, _ := q.cat.next.Topic(r.topic); topic.Created > 0 {
		order.Identity = q.cat.identity(topic)
		order.DeletedBefore = q.cat.next.LeftOn(r.topic, s.broker) && !kept
		order.Retiring = slices.Contains(topic.Retiring, s.broker)
	}
	order.Record = q.copies.text(q.cat.next, r.topic)
	s.out.Put(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Prepare{Prepare: order}})
}

// identity returns the topic's identity for brokers; nil: unknown.
func (p *pipeline) identity(topic catalog.Topic) *srtmv1.TopicIdentity {
	if topic.Created == 0 {
		return nil
	}
	return &srtmv1.TopicIdentity{Log: p.next.Log(), Created: topic.Created}
}

// announce reports to connected brokers whether the topic retires from them.
func (q *requests) announce(name string, spec *catalog.Spec, brokers []string, now time.Time) {
	for _, id := range brokers {
		if s := q.brokers.sessions[id]; s != nil {
			q.prepare(s, request{topic: name, sent: now}, spec)
		}
	}
}

// remove sends a RemoveTopic. unused: only if the topic is not in use. A topic whose creation
// failed is removed only then, or if the broker drains by force.
func (q *requests) remove(s *Session, r request, unused bool) {
	topic, _ := q.cat.next.Topic(r.topic)
	b, _ := q.cat.next.Broker(s.broker)
	// A broker that retires has the topic that exists now. An order to remove that topic is about all of it.
	uncreated := topic.Uncreated || q.cat.next.Keeps(r.topic, s.broker) && (unused || !q.cat.next.Holds(r.topic, s.broker))
	if uncreated && !unused && q.brokers.untaken(r.topic, b, r.sent) {
		uncreated = false
		q.brokers.logLost(r.topic, s.broker)
	}
	r.remove, r.owners = true, unused
	s.out.Put(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Remove{Remove: &srtmv1.RemoveTopic{
		Request: q.brokers.expect(s, r), Topic: r.topic, IfUnused: unused || uncreated, Uncreated: uncreated,
	}}})
}

// takeOver orders a broker to take over another broker's messages of a topic.
func (q *requests) takeOver(s *Session, r request, from string) {
	r.owners = true
	order := &srtmv1.TakeOver{Request: q.brokers.expect(s, r), Topic: r.topic, FromBrokerId: from}
	if topic, found := q.cat.committed.Topic(r.topic); found {
		order.Identity, order.Channels, order.ChannelsVersion = q.cat.identity(topic), channelsProto(topic.Channels), q.cat.committed.Version()
	}
	s.out.Put(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_TakeOver{TakeOver: order}})
}

// result handles a broker's answer. refused is the refused request, unless an owner
// handles the refusal. emptied lists the broker's channels beyond the limit.
func (q *requests) result(s *Session, p *srtmv1.PrepareResult, now time.Time) (refused *request, emptied []string, err error) {
	if err := checkChannels("prepare_result.channels", p.Channels); err != nil {
		return nil, nil, err
	}
	r := s.requests[p.Request]
	switch {
	case r == nil && p.Request > q.brokers.lastRequest:
		return nil, nil, &BadMessage{Field: "prepare_result.request", Problem: fmt.Sprintf("%d was never sent", p.Request)}
	case r == nil, r.answered:
		return nil, nil, nil // late: the request was repeated
	}
	r.answered = true
	r.settle(s.broker)
	if p.Error != "" {
		r.answer(s.broker, &RefusedError{p.Error})
		if !r.owners {
			r.done, r.sent = nil, now // keep the refused request, so that it is not repeated at once
			if r.remove && q.cat.next.Keeps(r.topic, s.broker) {
				return nil, nil, nil // as expected, and again with each repetition
			}
			return r, nil, nil
		}
		delete(s.requests, p.Request)
		return nil, nil, nil
	}
	if !r.prepares || len(p.Channels) == 0 {
		return nil, nil, q.complete(s, p.Request, r)
	}
	// The topic counts as prepared only when its other brokers have this broker's
	// channels.
	emptied = q.channels.adoptChannels(r.topic, p.Channels, func() {
		if s.requests[p.Request] == r { // otherwise it was given up
			_ = q.complete(s, p.Request, r)
		}
	})
	return nil, emptied, nil
}

// complete completes a request that the broker has carried out.
func (q *requests) complete(s *Session, number uint64, r *request) (err error) {
	r.answer(s.broker, nil)
	delete(s.requests, number)
	if r.owners {
		return nil
	}
	delete(s.unprepared, r.topic)
	switch {
	case r.remove:
		_, err = q.cat.stage(catalog.LeftoverRemoved{Topic: r.topic, Broker: s.broker})
	case q.cat.next.Expects(r.topic, s.broker):
		_, err = q.cat.stage(catalog.MemberPrepared{Topic: r.topic, Broker: s.broker})
	}
	return mustSucceed("result of a connected member refused", err)
}
