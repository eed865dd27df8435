package broker

import (
	"errors"
	"fmt"
	"math"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/expiry"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsqd/metadata"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/pacing/police"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Node is the control plane's view of a broker. Node implements an interface of nsqd/agent.
type Node Broker

// Node returns the control plane's view of b.
func (b *Broker) Node() *Node { return (*Node)(b) }

func (n *Node) broker() *Broker { return (*Broker)(n) }

// Topics returns the topics' names, sorted.
func (n *Node) Topics() []string {
	topics := n.broker().Topics()
	names := make([]string, len(topics))
	for i, t := range topics {
		names[i] = t.runner.name
	}
	return names
}

// Report is Broker.Report.
func (n *Node) Report(all bool) (stats []*srtmv1.TopicStats, changes bool) {
	return n.broker().Report(all)
}

// Prepare creates a topic and its channels, limited and without a share. An existing topic
// keeps its messages and its share. A nil identity leaves the identity unchanged.
// Afterwards the topic has the given durable channels of the given catalog version. It also
// keeps the returned channels, which the control plane does not know. Prepare returns after
// the topic is stored durably.
// Errors: ErrBadName, ErrDraining, ErrGone, ErrStorage.
func (n *Node) Prepare(topic string, channels []*srtmv1.TopicChannel, version uint64, slo time.Duration, quantile float64, overLimit srtmv1.OverLimitPolicy, identity *srtmv1.TopicIdentity) (unknown []*srtmv1.TopicChannel, err error) {
	_, absent := n.broker().Topic([]byte(topic))
	t, err := n.broker().CreateTopic(topic)
	if err != nil {
		return nil, err
	}
	// Limit comes first: with a channel but no limit, messages would be released.
	t.terms.Limit(SLO{Quantile: quantile, Latency: slo}, overLimit == srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_REJECT)
	identified := identity != nil && t.channels.identify(metadata.Identity{Log: identity.Log, Created: identity.Created})
	if identified {
		n.broker().shared.recorded(topic)
	}
	unknown, changed, err := t.channels.adoptCatalog(channels, version)
	if err == nil && (changed || identified || absent != nil) {
		err = n.broker().shared.Recorded()
	}
	if err != nil && absent != nil {
		n.broker().undo(t)
	}
	return unknown, err
}

// ChangeChannels executes a ChannelOrder, and returns after the result is stored durably.
// It does nothing if the topic does not exist or has another identity.
// Errors: ErrDraining, ErrBadName, ErrStorage.
func (n *Node) ChangeChannels(order *srtmv1.ChannelOrder) error {
	t, err := n.broker().Topic([]byte(order.Topic))
	if err != nil {
		return nil
	}
	changed, err := t.channels.change(metadata.Identity{Log: order.GetIdentity().GetLog(), Created: order.GetIdentity().GetCreated()}, order.Channels, order.Deleted, order.Version)
	switch {
	case errors.Is(err, ErrGone):
		return nil
	case err == nil && !changed: // a client may have made the same change just now
		err = n.broker().shared.Recorded()
	}
	return err
}

// Settled records that all connected brokers of the topic have these channels.
func (n *Node) Settled(topic string, channels []string) {
	if t, err := n.broker().Topic([]byte(topic)); err == nil {
		t.channels.markSettled(channels)
	}
}

// Expire is Topic.SetExpiries. Errors: ErrUnknownTopic; as SetExpiries.
func (n *Node) Expire(topic string, e expiry.Settings, channels map[string]expiry.Settings) error {
	t, err := n.broker().Topic([]byte(topic))
	if err != nil {
		return err
	}
	return t.SetExpiries(e, channels)
}

// Pace is Topic.SetPacing.
func (n *Node) Pace(topic string, mode srtmv1.PacingMode, weights []*srtmv1.PublisherGroup) {
	t, err := n.broker().Topic([]byte(topic))
	if err != nil {
		return // deleted after Prepare
	}
	modes := map[srtmv1.PacingMode]PaceMode{
		srtmv1.PacingMode_PACING_MODE_OFF: PaceOff, srtmv1.PacingMode_PACING_MODE_ADVISE: PaceAdvise,
		srtmv1.PacingMode_PACING_MODE_POLICE: PacePolice,
	}
	groups := make([]police.Group, 0, len(weights))
	for _, g := range weights {
		groups = append(groups, police.Group{Key: g.GetKey(), Count: int(g.GetCount()), Weight: uint8(min(g.GetWeight(), math.MaxUint8))})
	}
	t.intake.SetPacing(modes[mode], groups)
}

// Retire is Topic.Retire.
func (n *Node) Retire(topic string, retired bool) {
	if t, err := n.broker().Topic([]byte(topic)); err == nil {
		t.Retire(retired)
	}
}

// Identity returns the last identity given to Prepare, or nil if there is none.
func (n *Node) Identity(topic string) *srtmv1.TopicIdentity {
	t, err := n.broker().Topic([]byte(topic))
	if err != nil {
		return nil
	}
	t.runner.mu.Lock()
	defer t.runner.mu.Unlock()
	if t.channels.identity == (metadata.Identity{}) {
		return nil
	}
	return &srtmv1.TopicIdentity{Log: t.channels.identity.Log, Created: t.channels.identity.Created}
}

// Has reports whether the topic exists, and whether the topic is limited.
func (n *Node) Has(topic string) (exists, prepared bool) {
	t, err := n.broker().Topic([]byte(topic))
	if err != nil {
		return false, false
	}
	t.runner.mu.Lock()
	defer t.runner.mu.Unlock()
	return true, t.runner.mu.core.Contract().Limited()
}

// identify sets the identity, and reports whether it changed.
func (cs *channelSet) identify(as metadata.Identity) bool {
	cs.runner.mu.Lock()
	defer cs.runner.mu.Unlock()
	was := cs.identity
	if was == as {
		return false
	}
	if cs.identity = as; was.Log != as.Log {
		clear(cs.memberships) // versions of different logs are not comparable
	}
	cs.rosterChanged()
	return true
}

// Remove deletes a topic with its messages, and waits until the deletion is recorded. It
// succeeds if the topic does not exist.
func (n *Node) Remove(topic string) error {
	if err := n.broker().DeleteTopic(topic); err != nil && !errors.Is(err, ErrUnknownTopic) {
		return err
	}
	return n.broker().shared.Recorded() // includes deletions by other callers
}

// RemoveUnused deletes a topic that holds no messages and has no publishers. If the creation of
// the topic failed (uncreated), RemoveUnused first retires the topic, and a topic with messages
// loses its identity and the memberships of its channels: the next Prepare continues it.
// Errors: ErrInUse, ErrStorage.
func (n *Node) RemoveUnused(topic string, uncreated bool) error {
	if uncreated {
		n.Retire(topic, true)
	}
	err := n.broker().DeleteUnused(topic)
	if errors.Is(err, ErrUnknownTopic) {
		return nil
	}
	if !uncreated || !errors.Is(err, ErrInUse) {
		return err
	}
	t, gone := n.broker().Topic([]byte(topic))
	if gone != nil {
		return nil
	}
	t.runner.mu.Lock()
	t.runner.mu.uncreated = t.runner.mu.retired
	t.runner.mu.Unlock()
	if t.channels.identify(metadata.Identity{}) {
		n.broker().shared.recorded(topic)
		err = errors.Join(err, n.broker().shared.Recorded())
	}
	return err
}

// Seek is Topic.Seek or, with empty, Topic.EmptyChannel.
func (n *Node) Seek(topic, channel string, to *srtmv1.Place, empty bool) *srtmv1.SeekResult {
	p, err := Place{}, error(nil)
	switch to := to.GetTo().(type) {
	case *srtmv1.Place_Begin:
		p.Begin = true
	case *srtmv1.Place_End:
		p.End = true
	case *srtmv1.Place_Time:
		p.Time = max(1, mono.Wall(to.Time.AsTime().UnixNano()))
	case *srtmv1.Place_Offset:
		p.Offset = to.Offset
	default:
		if !empty {
			err = errors.New("unknown place of a seek; upgrade this broker")
		}
	}
	r := &srtmv1.SeekResult{}
	var t *Topic
	if err == nil {
		t, err = n.broker().Topic([]byte(topic))
	}
	switch {
	case err != nil:
	case empty:
		err = t.EmptyChannel(channel)
	default:
		r.Offset, err = t.Seek(channel, p)
	}
	if err == nil {
		return r
	}
	r.Offset, r.Reason, r.Error = 0, "BROKER_FAILED", err.Error()
	switch {
	case errors.Is(err, ErrUnknownTopic), errors.Is(err, ErrGone):
		r.Reason = "TOPIC_UNKNOWN"
	case errors.Is(err, ErrUnknownChannel):
		r.Reason = "CHANNEL_UNKNOWN"
	case errors.Is(err, queue.ErrNoCursor):
		r.Reason = "NO_CURSOR"
	case errors.Is(err, ErrSeek):
		r.Reason = "OFFSET_BEYOND_END"
	}
	return r
}

// Grant replaces the share of a topic. At flexUntil the share falls to base, and at until
// to nothing. Grant returns the tokens given up.
// Errors: ErrUnknownTopic, a share out of range.
func (n *Node) Grant(topic string, share, base tokenbucket.Share, flexUntil, until mono.Time, granted tokenbucket.Tokens) (tokenbucket.Tokens, error) {
	t, err := n.broker().Topic([]byte(topic))
	if err != nil {
		return 0, fmt.Errorf("grant for %q: %w", topic, err)
	}
	if err := errors.Join(share.Validate(), base.Validate()); err != nil {
		return 0, fmt.Errorf("grant for %q: %w", topic, err)
	}
	if granted < 0 {
		return 0, fmt.Errorf("grant for %q: %d tokens", topic, granted)
	}
	return t.terms.SetLeased(share, queue.Lease{Base: base, FlexUntil: flexUntil, Until: until}, granted), nil
}

// HoldFrom stops releases of limited topics from the given time on. A later call replaces
// the time. A step of a topic reads the clock before the hold time, and HoldFrom replaces the
// hold time before it reads the clock. So HoldFrom ticks every topic that an old time has held.
func (n *Node) HoldFrom(at mono.Time) {
	b := n.broker()
	if was := mono.Time(b.shared.holdFrom.Swap(int64(at))); was < at && !b.shared.now().Before(was) {
		for _, t := range b.Topics() { // release held messages
			t.runner.tick(b.shared.now())
		}
	}
}

// Renew is terms.Renew. It returns false if the topic does not exist.
func (n *Node) Renew(topic string, flexUntil, until mono.Time) (flex bool) {
	t, err := n.broker().Topic([]byte(topic))
	return err == nil && t.terms.Renew(flexUntil, until)
}
