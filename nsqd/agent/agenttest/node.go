// Package agenttest has a Node in memory, for tests of the agent and of the control plane. The Node has
// topics, channels and token buckets as a broker does, but no messages. A test can make the Node fail
// or wait.
package agenttest

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/expiry"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Topic is a copy of a Node's topic.
type Topic struct {
	Limited   bool
	Channels  []string // sorted
	Paused    []string // of them, sorted
	Settled   []string // of them, sorted
	SLO       time.Duration
	Quantile  float64
	OverLimit srtmv1.OverLimitPolicy
	Pacing    srtmv1.PacingMode

	Expiry        expiry.Settings
	ChannelExpiry map[string]expiry.Settings
	Retired       bool
	Share         tokenbucket.Share
	Identity      *srtmv1.TopicIdentity
	// Base is the rest of Share after FlexUntil. After Until nothing remains.
	Base             tokenbucket.Share
	FlexUntil, Until mono.Time
	// Given is the number of tokens from grants, less the released tokens. Given does not include the
	// tokens that the bucket has earned.
	Given tokenbucket.Tokens
	// Grants counts the grants put in force.
	Grants int
}

// Node is an agent.Node. Create a Node with New.
type Node struct {
	mu struct {
		sync.Mutex
		topics  map[string]*topic
		prepare func(topic string) error
		remove  func(topic string) error
		change  func(topic string) error
		used    map[string]bool
		fewer   bool // a topic was deleted since the last report
		hold    mono.Time
	}
}

type topic struct {
	Topic
	bucket   tokenbucket.Bucket
	stats    *srtmv1.TopicStats
	listed   bool              // a report has the topic's current state
	capture  *capture          // nil: no capture
	versions map[string]uint64 // version of a channel's creation in Prepare or in an order

	captures int // number of captures begun
}

// New returns a Node without topics.
func New() *Node {
	n := &Node{}
	n.mu.topics = map[string]*topic{}
	n.mu.used = map[string]bool{}
	n.Sabotage(nil, nil)
	n.SabotageChange(func(string) error { return nil })
	return n
}

// Sabotage makes every Prepare and Remove call a function first. The function may block; its error
// makes the call fail. nil: no function.
func (n *Node) Sabotage(prepare, remove func(topic string) error) {
	healthy := func(string) error { return nil }
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.prepare, n.mu.remove = healthy, healthy
	if prepare != nil {
		n.mu.prepare = prepare
	}
	if remove != nil {
		n.mu.remove = remove
	}
}

// SabotageChange makes every ChangeChannels call a function first. The function may block; its error
// makes the call fail.
func (n *Node) SabotageChange(change func(topic string) error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.change = change
}

// Use sets whether RemoveUnused refuses to remove a topic, as if the topic were used since its last
// report.
func (n *Node) Use(name string, used bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.used[name] = used
}

// Create makes an unlimited topic, as a publisher to a standalone broker does.
func (n *Node) Create(name string, channels ...string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.topics[name] = &topic{Topic: Topic{Channels: channels}}
}

// Drop deletes a topic behind the agent's back.
func (n *Node) Drop(name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.mu.topics, name)
	n.mu.fewer = true
}

// Measure sets the stats of a topic in all later reports, while the topic exists.
func (n *Node) Measure(name string, stats *srtmv1.TopicStats) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.topics[name].stats = stats
}

// Topic returns a copy of the topic, and whether the topic exists.
func (n *Node) Topic(name string) (Topic, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	t, ok := n.mu.topics[name]
	if !ok {
		return Topic{}, false
	}
	t.lapse()
	return t.Topic, true
}

// Pace implements agent.Node. This node sends publishers nothing.
func (n *Node) Pace(name string, mode srtmv1.PacingMode, _ []*srtmv1.PublisherGroup) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if t, ok := n.mu.topics[name]; ok {
		t.Pacing = mode
	}
}

// Retire implements agent.Node.
func (n *Node) Retire(name string, retired bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if t, ok := n.mu.topics[name]; ok {
		t.Retired = retired
	}
}

// Expire implements agent.Node. This node keeps every message.
func (n *Node) Expire(name string, e expiry.Settings, channels map[string]expiry.Settings) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if t, ok := n.mu.topics[name]; ok {
		t.Expiry, t.ChannelExpiry = e, channels
	}
	return nil
}

// Prepare implements agent.Node.
func (n *Node) Prepare(name string, channels []*srtmv1.TopicChannel, version uint64, slo time.Duration, quantile float64, overLimit srtmv1.OverLimitPolicy, identity *srtmv1.TopicIdentity) (unknown []*srtmv1.TopicChannel, err error) {
	n.mu.Lock()
	first := n.mu.prepare
	n.mu.Unlock()
	if err := first(name); err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	t := n.mu.topics[name]
	if t == nil {
		t = &topic{}
		n.mu.topics[name] = t
	}
	if !t.Limited {
		t.bucket = tokenbucket.New(tokenbucket.Share{}, clock.Mono())
		t.FlexUntil, t.Until = mono.Never, mono.Never
	}
	t.listed = false
	t.Limited, t.SLO, t.Quantile, t.OverLimit = true, slo, quantile, overLimit
	if identity != nil {
		if identity.Log != t.Identity.GetLog() {
			clear(t.versions)
		}
		t.Identity = identity
	}
	wanted := map[string]bool{}
	for _, c := range channels {
		wanted[c.Name] = true
	}
	var deleted []string
	for _, name := range t.Channels {
		if !wanted[name] {
			deleted = append(deleted, name)
		}
	}
	t.change(channels, deleted, version)
	for _, name := range t.Channels {
		if !wanted[name] {
			unknown = append(unknown, &srtmv1.TopicChannel{Name: name, Paused: slices.Contains(t.Paused, name)})
		}
	}
	return unknown, nil
}

// change changes channels as broker.Topic does.
func (t *topic) change(channels []*srtmv1.TopicChannel, deleted []string, version uint64) {
	if t.versions == nil {
		t.versions = map[string]uint64{}
	}
	all, paused := map[string]bool{}, map[string]bool{}
	for _, name := range t.Channels {
		all[name] = true
	}
	for _, name := range t.Paused {
		paused[name] = true
	}
	for _, name := range deleted {
		if created := t.versions[name]; created > 0 && created <= version {
			delete(all, name)
			delete(t.versions, name)
		}
	}
	for _, c := range channels {
		all[c.Name], paused[c.Name], t.versions[c.Name] = true, c.Paused, c.Created
	}
	maps.DeleteFunc(paused, func(name string, paused bool) bool { return !paused || !all[name] })
	t.Channels, t.Paused = slices.Sorted(maps.Keys(all)), slices.Sorted(maps.Keys(paused))
}

// ChangeChannels implements agent.Node.
func (n *Node) ChangeChannels(order *srtmv1.ChannelOrder) error {
	n.mu.Lock()
	first := n.mu.change
	n.mu.Unlock()
	if err := first(order.Topic); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if t := n.mu.topics[order.Topic]; t != nil && proto.Equal(t.Identity, order.Identity) {
		t.change(order.Channels, order.Deleted, order.Version)
	}
	return nil
}

// Settled implements agent.Node.
func (n *Node) Settled(name string, channels []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if t := n.mu.topics[name]; t != nil {
		t.Settled = slices.Compact(slices.Sorted(slices.Values(append(slices.Clone(t.Settled), channels...))))
	}
}

// Subscribe creates a channel of a topic, as a subscriber does.
func (n *Node) Subscribe(name, channel string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	t := n.mu.topics[name]
	t.Channels = slices.Compact(slices.Sorted(slices.Values(append(slices.Clone(t.Channels), channel))))
}

// Has implements agent.Node.
func (n *Node) Has(name string) (exists, prepared bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	t := n.mu.topics[name]
	return t != nil, t != nil && t.Limited
}

// Identity implements agent.Node.
func (n *Node) Identity(name string) *srtmv1.TopicIdentity {
	n.mu.Lock()
	defer n.mu.Unlock()
	if t := n.mu.topics[name]; t != nil {
		return t.Identity
	}
	return nil
}

// Remove implements agent.Node.
func (n *Node) Remove(name string) error {
	n.mu.Lock()
	first := n.mu.remove
	n.mu.Unlock()
	if err := first(name); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.mu.topics, name)
	n.mu.fewer = true
	return nil
}

// ErrUsed is the error of RemoveUnused for a topic in use (see Use).
var ErrUsed = errors.New("the topic is in use")

// RemoveUnused implements agent.Node.
func (n *Node) RemoveUnused(name string, uncreated bool) error {
	n.mu.Lock()
	used := n.mu.used[name]
	if t, exists := n.mu.topics[name]; exists && used && uncreated {
		t.Retired, t.Identity = true, nil
	}
	n.mu.Unlock()
	if used {
		return fmt.Errorf("topic %s: %w", name, ErrUsed)
	}
	return n.Remove(name)
}

// ErrNotPrepared is the error of Grant for a topic that does not exist or is not limited.
var ErrNotPrepared = errors.New("the topic is not prepared")

// Seek implements agent.Node. An existing channel is at offset 7.
func (n *Node) Seek(name, channel string, _ *srtmv1.Place, _ bool) *srtmv1.SeekResult {
	n.mu.Lock()
	defer n.mu.Unlock()
	if t := n.mu.topics[name]; t == nil {
		return &srtmv1.SeekResult{Reason: "TOPIC_UNKNOWN", Error: "no such topic"}
	} else if !slices.Contains(t.Channels, channel) {
		return &srtmv1.SeekResult{Reason: "CHANNEL_UNKNOWN", Error: "no such channel"}
	}
	return &srtmv1.SeekResult{Offset: 7}
}

// Grant implements agent.Node.
func (n *Node) Grant(name string, share, base tokenbucket.Share, flexUntil, until mono.Time, granted tokenbucket.Tokens) (tokenbucket.Tokens, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	t := n.mu.topics[name]
	if t == nil || !t.Limited {
		return 0, fmt.Errorf("topic %s: %w", name, ErrNotPrepared)
	}
	t.lapse()
	released := t.bucket.Retune(clock.Mono(), share, granted)
	t.Share, t.Base, t.FlexUntil, t.Until = share, base, flexUntil, until
	t.Given += granted - released
	t.Grants++
	t.lapse()
	return released, nil
}

// HoldFrom implements agent.Node.
func (n *Node) HoldFrom(at mono.Time) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.hold = at
}

// Held returns the time of the last HoldFrom; 0: HoldFrom was not called.
func (n *Node) Held() mono.Time {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.mu.hold
}

// Renew implements agent.Node.
func (n *Node) Renew(name string, flexUntil, until mono.Time) (flex bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	t := n.mu.topics[name]
	if t == nil {
		return false
	}
	t.lapse()
	if t.FlexUntil != mono.Never {
		t.FlexUntil, flex = flexUntil, true
	}
	if !t.Share.IsZero() {
		t.Until = until
	}
	return flex
}

// lapse ends the expired parts of the share.
func (t *topic) lapse() {
	now := clock.Mono()
	end := func(s tokenbucket.Share) {
		t.bucket.Retune(now, s, 0)
		t.Share, t.FlexUntil = s, mono.Never
	}
	if t.Limited && !now.Before(t.FlexUntil) {
		end(t.Base)
	}
	if t.Limited && !now.Before(t.Until) {
		end(tokenbucket.Share{})
		t.Base, t.Until = tokenbucket.Share{}, mono.Never
	}
}

// Report implements agent.Node. Without Measure the stats of a topic are zero.
func (n *Node) Report(all bool) (topics []*srtmv1.TopicStats, changes bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	changes = !all && !n.mu.fewer
	n.mu.fewer = false
	for _, name := range slices.Sorted(maps.Keys(n.mu.topics)) {
		t := n.mu.topics[name]
		if changes && t.listed && t.stats == nil {
			continue
		}
		t.listed = t.stats == nil
		stats := &srtmv1.TopicStats{}
		if t.stats != nil {
			stats = proto.CloneOf(t.stats)
		}
		stats.Topic, stats.Channels, stats.Unprepared = name, slices.Clone(t.Channels), !t.Limited
		topics = append(topics, stats)
	}
	return topics, changes
}

// Topics implements agent.Node.
func (n *Node) Topics() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Collect(maps.Keys(n.mu.topics))
}
