package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/reports"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
	"github.com/srtm-io/srtm/nsq/wire"
)

// sharesTimeout is the wait for the adaptor. Without an answer a status omits the shares.
const sharesTimeout = time.Second

// reader serves reads, on a follower too. It is embedded for its exported methods, which
// acquire the lock; its other methods require the lock for reading.
type View struct {
	// Set once.
	cfg       *Config
	mu        *sync.RWMutex
	cat       *pipeline
	brokers   *brokers
	topics    *topics
	knowledge *knowledge
	tuner     *tuner.Tuner
	adaptor   grants
	tenants   *tenants
	life      *lifetime
}

// Topic returns the named topic. Errors: catalog.ErrTopicUnknown, ErrUnread.
func (r *View) Topic(name string) (catalog.Topic, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if err := r.knowledge.ready(); err != nil {
		return catalog.Topic{}, err
	}
	topic, ok := r.cat.committed.Topic(name)
	if !ok {
		return catalog.Topic{}, r.knowledge.deny(r.missing(name, fmt.Errorf("topic %s: %w", name, catalog.ErrTopicUnknown)))
	}
	return r.topics.peek(name).condition.ApplyTo(topic), nil
}

// missing returns err. If err says that a topic is unknown, but the topic may exist,
// missing returns catalog.ErrUnread, so that publishers stay on their brokers. The topic
// may exist if a broker has joined with it, or if the catalog was empty and brokers have
// not had time to join.
func (r *View) missing(topic string, err error) error {
	if !errors.Is(err, catalog.ErrTopicUnknown) {
		return err
	}
	if elsewhere := r.knowledge.elsewhere(); elsewhere != nil && r.cat.committed.Len() == 0 {
		return elsewhere // only the leader knows whether there are no topics
	}
	if r.knowledge.empty && !r.brokers.fresh() && (r.knowledge.settled.IsZero() || time.Now().Before(r.knowledge.settled)) {
		return fmt.Errorf("topic %s: the store of this loaddistributor was empty, and brokers may come back with it: %w", topic, catalog.ErrUnread)
	}
	for _, s := range r.brokers.sessions {
		if s.unknown[topic] {
			return fmt.Errorf("topic %s: broker %s holds it, and the store of this loaddistributor does not have it: %w", topic, s.broker, catalog.ErrUnread)
		}
	}
	return err
}

// Topics returns up to limit topics with names after the given one, by name.
func (r *View) Topics(after string, limit int) []catalog.Topic {
	r.mu.RLock()
	defer r.mu.RUnlock()
	topics := r.cat.committed.Topics(after, limit)
	for i, topic := range topics {
		topics[i] = r.topics.peek(topic.Spec.Name()).condition.ApplyTo(topic)
	}
	return topics
}

// fresh reports whether there are brokers and none of them was in a cluster before. Then
// the cluster is new, and the store has lost nothing.
func (b *brokers) fresh() bool {
	// order: all must be fresh
	for _, s := range b.sessions {
		if !s.fresh {
			return false
		}
	}
	return len(b.sessions) > 0
}

// CountTopics returns the number of topics, and the number of topics of a tenant.
func (r *View) CountTopics(tenant string) (total, ofTenant int) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.cat.committed.Len(), r.cat.committed.TenantTopics(tenant)
}

// Exists reports whether the catalog has a topic, in any state.
func (r *View) Exists(topic string) bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	_, found := r.cat.committed.Topic(topic)
	return found
}

// eachTopic calls f with every topic, by name, as shown to readers, and with the lock held for
// reading for a few topics at a time. Topics may change, be added or be removed
// meanwhile. Requires: the lock is not held.
func eachTopic(mu *sync.RWMutex, cat *pipeline, topics *topics, f func(catalog.Topic)) {
	cat.inTurns(mu.RLocker(), func(name string) (work int) {
		topic, _ := cat.committed.Topic(name)
		f(topics.peek(name).condition.ApplyTo(topic))
		return quietPerBusy
	})
}

// Brokers returns all known brokers, by id.
func (r *View) Brokers() []catalog.Broker {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.cat.committed.Brokers()
}

// Offered returns the offered rate in a broker's latest report, msg/s.
func (r *View) Offered(broker string) float64 {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.brokers.reported(broker).Offered()
}

// Status returns the measurements of the topic, and the shares in force.
func (r *View) Status(ctx context.Context, topic catalog.Topic) *srtmv1.TopicStatus {
	name := topic.Spec.Name()
	shares, err := r.adaptor.shares(ctx, name, sharesTimeout)
	if err != nil {
		r.cfg.Log.Debug("status without shares", obs.KeyTopic, name, obs.KeyError, err)
	}

	now := time.Now()
	start := now.Add(-r.cfg.Window)
	status := &srtmv1.TopicStatus{Window: durationpb.New(r.cfg.Window)}
	var pooled reports.Sum
	r.mu.RLock()
	if owner := r.topics.peek(name).owner; owner != nil {
		status.Moving = owner.waiting
	}
	history := r.topics.peek(name).moves
	status.Moves, _ = history.page(0, shownMoves)
	if f := r.tuner.Status(name, now); f.Step != "" {
		status.Fitting, status.Fit = f.Step, fitProto(f)
	}
	reported := make([][]reports.Report, len(topic.Plan.Quotas)) // reports are immutable
	for i, q := range topic.Plan.Quotas {
		if t := r.brokers.reported(q.Broker).Topic(name); t != nil {
			reported[i] = slices.Clone(t.Within(start))
		}
	}
	r.mu.RUnlock()
	var counts []tuner.Count
	for i, q := range topic.Plan.Quotas {
		b := &srtmv1.BrokerTopicStatus{BrokerId: q.Broker}
		if m := shares[q.Broker]; m.GetAcknowledgedEpoch() > 0 {
			b.Share, b.Epoch = m.Acknowledged, m.AcknowledgedEpoch
		}
		if n := len(reported[i]); n > 0 {
			var sum reports.Sum
			for _, report := range reported[i] {
				sum.AddInterval(report.Stats)
			}
			b.Last = reported[i][n-1].Stats
			b.Window, b.P99AccessFraction = sum.Stats()
			pooled.AddBroker(b.Window)
			counts = append(counts, tuner.Count{Part: q.Broker, Delivered: b.Window.Delivered, Exceeded: b.Window.Exceeded})
		}
		status.Brokers = append(status.Brokers, b)
	}
	status.Pooled, status.P99AccessFraction = pooled.Stats()
	status.Pooled.Topic = name
	r.mu.RLock()
	d := r.topics.peek(name).condition
	v := d.VerdictOn(topic, counts)
	if d != nil && d.Refused()+uint64(d.Stranded) > 0 {
		status.Unaccepted, status.PublishersWithoutBroker = d.Refused(), uint32(d.Stranded)
		if d.Stranded > 0 {
			status.WithoutBrokerSince = timestamppb.New(d.Since)
		}
	}
	r.mu.RUnlock()
	if v.Judged {
		status.ExceedFraction = v.Fraction
		if met := v.Decision == tuner.Within; met || v.Decision == tuner.Beyond {
			status.SloMet = &met
		}
	}
	return status
}

// State is the controller's part of /debug/state.
type State struct {
	Version uint64       `json:"version"` // of the catalog
	Brokers []Node       `json:"brokers"` // connected
	Topics  []TopicState `json:"topics"`
}

// TopicState is one topic of State.
type TopicState struct {
	Name    string   `json:"name"`
	State   string   `json:"state"`
	Reason  string   `json:"reason,omitempty"`
	Policy  string   `json:"policy"`
	Epoch   uint64   `json:"epoch"`
	Brokers []string `json:"brokers"`
}

// State returns a copy of the controller's state, without publishers.
func (r *View) State() State {
	s := State{Brokers: r.Nodes(), Topics: []TopicState{}}
	r.mu.RLock()
	s.Version = r.cat.committed.Version()
	r.mu.RUnlock()
	eachTopic(r.mu, r.cat, r.topics, func(topic catalog.Topic) {
		state := TopicState{
			Name: topic.Spec.Name(), State: topic.State.String(), Reason: topic.Reason,
			Policy: topic.Plan.Policy, Epoch: topic.Placement.Epoch(), Brokers: topic.Plan.Brokers(),
		}
		s.Topics = append(s.Topics, state)
	})
	return s
}

// Node is a connected broker with its topics.
type Node struct {
	catalog.Broker
	Remote string   // address from which the broker connects
	Topics []string // by name
}

// Nodes returns the connected brokers, by id.
func (r *View) Nodes() []Node {
	r.mu.RLock()
	defer r.mu.RUnlock()
	nodes := make([]Node, 0, len(r.brokers.sessions))
	for _, id := range r.cat.connected() {
		node := r.node(id)
		node.Topics = slices.Sorted(maps.Keys(r.listed(id)))
		nodes = append(nodes, node)
	}
	return nodes
}

// Connected is Nodes without Topics.
func (r *View) Connected() []Node {
	r.mu.RLock()
	defer r.mu.RUnlock()
	ids := r.cat.connected()
	nodes := make([]Node, len(ids))
	for i, id := range ids {
		nodes[i] = r.node(id)
	}
	return nodes
}

// connected returns the brokers with a session, by id. On a follower it returns the
// brokers with a session at the leader.
func (p *pipeline) connected() []string {
	var ids []string
	for _, b := range p.committed.Brokers() {
		if b.Connected {
			ids = append(ids, b.ID)
		}
	}
	return ids
}

// listed returns the topics that consumers can read from a connected broker: active
// topics placed on it, and reported topics that are placed nowhere. It ignores reports
// about placed topics: the copy may be a leftover, or be about to be removed.
func (r *View) listed(id string) map[string]bool {
	set := map[string]bool{}
	for _, name := range r.cat.committed.Placed(id) {
		if topic, _ := r.cat.committed.Topic(name); topic.Open() {
			set[name] = true
		}
	}
	for name := range r.brokers.reported(id).Topics() {
		if _, managed := r.cat.committed.Topic(name); !managed && !r.cat.committed.LeftOn(name, id) {
			set[name] = true
		}
	}
	return set
}

func (r *View) node(id string) Node {
	b, _ := r.cat.committed.Broker(id)
	node := Node{Broker: b}
	if s := r.brokers.sessions[id]; s != nil {
		node.Remote = s.remote
	}
	return node
}

// TopicNames returns the names of all topics that consumers can read, placed or only
// reported, sorted.
func (r *View) TopicNames() []string {
	r.mu.RLock()
	defer r.mu.RUnlock()
	set := map[string]bool{}
	for _, id := range r.cat.connected() {
		maps.Copy(set, r.listed(id))
	}
	return slices.Sorted(maps.Keys(set))
}

// Producers returns the connected brokers with the topic, by id, and the topic's
// channels, sorted: for a placed topic the durable channels of the catalog and the
// ephemeral channels that brokers report. found means that a broker has the topic, or
// that the topic is placed and active.
func (r *View) Producers(topic string) (nodes []Node, channels []string, found bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	set := map[string]bool{}
	placed, managed := r.cat.committed.Topic(topic)
	if managed {
		if !placed.Open() {
			return nil, nil, false
		}
		for _, channel := range placed.Channels {
			set[channel.Name] = true
		}
	}
	for _, id := range r.cat.connected() {
		if !managed && r.cat.committed.LeftOn(topic, id) {
			continue // it was deleted, or its creation failed
		}
		reported := r.brokers.reported(id)
		if t := reported.Topic(topic); t != nil {
			for _, channel := range t.Channels {
				if !managed || wire.Ephemeral(channel) { // the catalog has the durable ones
					set[channel] = true
				}
			}
		}
		if managed && r.cat.committed.IsListed(topic, id) || !managed && reported.Has(topic) {
			nodes = append(nodes, r.node(id))
		}
	}
	return nodes, slices.Sorted(maps.Keys(set)), managed || len(nodes) > 0
}

// BrokerTopics returns the topics that are placed on the broker or have messages left
// there, by name.
func (r *View) BrokerTopics(id string) []string {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.cat.committed.Placed(id)
}

// piece is the maximum number of assignments in a Change.
const piece = 5000

// Change is a message to a watcher.
type Change struct {
	Assignments []catalog.Assignment
	Epoch       uint64
	More        bool // more of the same change follows
}

// watcher only holds a wake-up. Changes before the next look share one wake-up, so a slow
// watcher costs nothing, and misses only outdated states.
type watcher struct {
	publishers []string      // set once; empty: all publishers of the topic
	wake       chan struct{} // 1 deep
}

// watched returns a function that reports whether a publisher of the topic is watched
// here.
func (t *topics) watched(topic string) func(publisher string) bool {
	ids := map[string]bool{}
	for w := range t.peek(topic).watchers {
		if len(w.publishers) == 0 {
			return func(string) bool { return true }
		}
		for _, id := range w.publishers {
			ids[id] = true
		}
	}
	return func(id string) bool { return ids[id] }
}

func (t *topics) wakeWatchers(topic string) {
	for w := range t.peek(topic).watchers {
		select {
		case w.wake <- struct{}{}:
		default: // a wake-up is already pending
		}
	}
}

// Resolve returns a publisher's broker. Errors: catalog.ErrTopicUnknown,
// ErrPublisherUnknown, ErrUnplaced, ErrNotActive, ErrUnread.
func (r *View) Resolve(topic, publisher string) (catalog.Assignment, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if err := r.knowledge.ready(); err != nil {
		return catalog.Assignment{}, err
	}
	a, err := r.cat.committed.Resolve(topic, publisher)
	return a, r.knowledge.deny(r.missing(topic, err))
}

// FindBrokers returns the connected brokers with a topic, by id. Errors about the topic
// are as in Resolve.
func (r *View) FindBrokers(topic string) ([]Node, error) {
	nodes, _, found := r.Producers(topic)
	r.mu.RLock()
	defer r.mu.RUnlock()
	if err := r.knowledge.ready(); err != nil {
		return nil, err
	}
	if !found {
		return nil, r.knowledge.deny(r.missing(topic, catalog.ErrTopicUnknown))
	}
	return nodes, nil
}

// Watch calls send with the present assignments of the named publishers (all if none is
// named), and then with every changed assignment, until the topic is deleted
// (catalog.ErrTopicUnknown), ctx ends or send fails. A slow send delays no other watcher,
// and skips intermediate states. Requires: the names are distinct.
func (r *View) Watch(ctx context.Context, topic string, publishers []string, send func(Change) error) error {
	w := &watcher{publishers: publishers, wake: make(chan struct{}, 1)}
	r.mu.Lock()
	if err := r.knowledge.ready(); err != nil {
		r.mu.Unlock()
		return err
	}
	first, found := r.cat.committed.Topic(topic)
	var err error
	switch {
	case !found:
		err = r.knowledge.deny(r.missing(topic, fmt.Errorf("topic %s: %w", topic, catalog.ErrTopicUnknown)))
	case first.State == catalog.Preparing || first.State == catalog.Deleting:
		err = fmt.Errorf("topic %s is %v: %w", topic, first.State, catalog.ErrNotActive)
	case r.knowledge.cut && len(publishers) > 0: // only a later stream knows which are unknown
		publishers = slices.DeleteFunc(slices.Clone(publishers), func(id string) bool { return first.Placement.Of(id).Unknown })
		if len(publishers) == 0 {
			err = catalog.ErrUnread
		}
	}
	if err != nil {
		r.mu.Unlock()
		return err
	}
	l := r.topics.entry(topic)
	if l.watchers == nil {
		l.watchers = map[*watcher]struct{}{}
	}
	l.watchers[w] = struct{}{}
	ending := r.life.ending
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		l := r.topics.entry(topic)
		if delete(l.watchers, w); len(l.watchers) == 0 && r.knowledge.leader != nil {
			delete(r.topics.byName, topic) // a follower has no other data about the topic
		}
	}()

	var sent *catalog.Placement
	for now := first; ; {
		if now.Placement != sent {
			if err := difference(sent, now.Placement, publishers, send); err != nil {
				return err
			}
			sent = now.Placement
		}
		select {
		case <-w.wake:
		case <-ending:
			return ErrClosing
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		r.mu.RLock()
		now, found = r.cat.committed.Topic(topic)
		r.mu.RUnlock()
		if !found || now.State == catalog.Deleting || now.Ordered != first.Ordered {
			return fmt.Errorf("topic %s was deleted: %w", topic, catalog.ErrTopicUnknown)
		}
	}
}

// difference sends the assignments of now that differ from old. A nil old is empty.
// publishers selects assignments; empty: all.
func difference(old, now *catalog.Placement, publishers []string, send func(Change) error) error {
	count := len(publishers)
	if count == 0 {
		count = now.Len()
	}
	var batch []catalog.Assignment
	sent := false
	flush := func(more bool) error {
		sent = true
		err := send(Change{Assignments: batch, Epoch: now.Epoch(), More: more})
		batch = nil
		return err
	}
	for n := range count {
		var a catalog.Assignment
		if len(publishers) > 0 {
			a = now.Of(publishers[n])
		} else {
			a = now.At(n)
		}
		if old != nil {
			if previous := old.Of(a.Publisher); previous.Unknown == a.Unknown && previous.Endpoint == a.Endpoint && previous.Paced == a.Paced {
				continue
			}
		}
		if len(batch) == piece {
			if err := flush(true); err != nil {
				return err
			}
		}
		batch = append(batch, a)
	}
	if len(batch) > 0 || (old == nil && !sent) {
		return flush(false)
	}
	return nil
}
