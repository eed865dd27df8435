package controller

import (
	"context"
	"errors"
	"fmt"
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
	adaptor   ledger
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
	topic, ok := r.cat.shown.Topic(name)
	if !ok {
		return catalog.Topic{}, r.knowledge.deny(r.missing(name, fmt.Errorf("topic %s: %w", name, catalog.ErrTopicUnknown)))
	}
	return r.topics.peek(name).condition.Show(topic), nil
}

// missing returns err. If err says that a topic is unknown, but the topic may exist,
// missing returns catalog.ErrUnread, so that publishers stay on their brokers. The topic
// may exist if a broker has joined with it, or if the catalog was empty and brokers have
// not had time to join.
func (r *View) missing(topic string, err error) error {
	if !errors.Is(err, catalog.ErrTopicUnknown) {
		return err
	}
	if elsewhere := r.knowledge.elsewhere(); elsewhere != nil && r.cat.shown.Len() == 0 {
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
	topics := r.cat.shown.Topics(after, limit)
	for i, topic := range topics {
		topics[i] = r.topics.peek(topic.Spec.Name()).condition.Show(topic)
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
func (r *View) CountTopics(tenant string) (all, of int) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.cat.shown.Len(), r.cat.shown.TenantTopics(tenant)
}

// Knows reports whether the catalog has a topic, in any state.
func (r *View) Knows(topic string) bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	_, known := r.cat.shown.Topic(topic)
	return known
}

// eachTopic calls f with every topic, by name, as shown to readers, and with the lock held for
// reading for a few topics at a time. Topics may change, be added or be removed
// meanwhile. Requires: the lock is not held.
func eachTopic(mu *sync.RWMutex, cat *pipeline, topics *topics, f func(catalog.Topic)) {
	cat.inTurns(mu.RLocker(), func(name string) (work int) {
		topic, _ := cat.shown.Topic(name)
		f(topics.peek(name).condition.Show(topic))
		return quietPerBusy
	})
}

// Brokers returns all known brokers, by id.
func (r *View) Brokers() []catalog.Broker {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.cat.shown.Brokers()
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
	held, err := r.adaptor.shares(ctx, name, sharesTimeout)
	if err != nil {
		r.cfg.Log.Debug("status without shares", obs.KeyTopic, name, obs.KeyError, err)
	}

	now := time.Now()
	from := now.Add(-r.cfg.Window)
	status := &srtmv1.TopicStatus{Window: durationpb.New(r.cfg.Window)}
	var pooled reports.Sum
	r.mu.RLock()
	if own := r.topics.peek(name).owner; own != nil {
		status.Moving = own.waiting
	}
	moves := r.topics.peek(name).moves
	status.Moves, _ = moves.page(0, shownMoves)
	if f := r.tuner.Status(name, now); f.Step != "" {
		status.Fitting, status.Fit = f.Step, fitProto(f)
	}
	said := make([][]reports.Report, len(topic.Plan.Quotas)) // reports are immutable
	for i, q := range topic.Plan.Quotas {
		if t := r.brokers.reported(q.Broker).Topic(name); t != nil {
			said[i] = slices.Clone(t.Within(from))
		}
	}
	r.mu.RUnlock()
	var counts []tuner.Count
	for i, q := range topic.Plan.Quotas {
		b := &srtmv1.BrokerTopicStatus{BrokerId: q.Broker}
		if m := held[q.Broker]; m.GetAcknowledgedEpoch() > 0 {
			b.Share, b.Epoch = m.Acknowledged, m.AcknowledgedEpoch
		}
		if n := len(said[i]); n > 0 {
			var sum reports.Sum
			for _, one := range said[i] {
				sum.InTime(one.Stats)
			}
			b.Last = said[i][n-1].Stats
			b.Window, b.P99AccessFraction = sum.Stats()
			pooled.Beside(b.Window)
			counts = append(counts, tuner.Count{Part: q.Broker, Delivered: b.Window.Delivered, Exceeded: b.Window.Exceeded})
		}
		status.Brokers = append(status.Brokers, b)
	}
	status.Pooled, status.P99AccessFraction = pooled.Stats()
	status.Pooled.Topic = name
	r.mu.RLock()
	d := r.topics.peek(name).condition
	v := d.Judge(topic, counts)
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
	s.Version = r.cat.shown.Version()
	r.mu.RUnlock()
	eachTopic(r.mu, r.cat, r.topics, func(topic catalog.Topic) {
		shown := TopicState{
			Name: topic.Spec.Name(), State: topic.State.String(), Reason: topic.Reason,
			Policy: topic.Plan.Policy, Epoch: topic.Placement.Epoch(), Brokers: topic.Plan.Brokers(),
		}
		s.Topics = append(s.Topics, shown)
	})
	return s
}
