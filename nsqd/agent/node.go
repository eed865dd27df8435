package agent

import (
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/expiry"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Node is the broker as the control plane sees it. The agent calls a Node from one goroutine at a time,
// while the node's own work continues. The methods must therefore be safe beside that work, and must
// not wait for a client or for the network.
type Node interface {
	// Prepare creates a topic and its channels, with a limit and without a share: the topic accepts
	// messages and releases none. If the topic exists, Prepare adds the missing channels and sets the
	// SLO and the policy. An existing topic keeps its messages and, if limited, its share; an unlimited
	// topic becomes limited, with an empty share. quantile is in (0, 1) and slo is positive. If
	// identity is not nil, the node stores identity with the topic.
	//
	// After Prepare the topic has the given durable channels, from a version of the catalog, and the
	// unknown channels, which Prepare returns: durable channels that were created here and that the
	// control plane has not named since. The error goes to the operator who creates the topic.
	Prepare(topic string, channels []*srtmv1.TopicChannel, version uint64, slo time.Duration, quantile float64, overLimit srtmv1.OverLimitPolicy, identity *srtmv1.TopicIdentity) (unknown []*srtmv1.TopicChannel, err error)

	// ChangeChannels creates, pauses and deletes durable channels of a topic. ChangeChannels returns
	// when the change survives a crash. After an error only the deletions may have been carried out. If
	// the topic does not exist, or another topic has its name, ChangeChannels does nothing and
	// succeeds. ChangeChannels waits for the disk, so the agent calls it beside the other methods, but
	// not beside Prepare, Remove, RemoveUnused and Seek, and once at a time for a topic.
	ChangeChannels(order *srtmv1.ChannelOrder) error

	// Settled records that all connected brokers of the topic have these channels.
	Settled(topic string, channels []string)

	// Expire sets when the node discards messages of a prepared topic.
	Expire(topic string, e expiry.Settings, channels map[string]expiry.Settings) error

	// Pace replaces the pacing mode of a prepared topic, and the weights of its publisher groups.
	Pace(topic string, mode srtmv1.PacingMode, weights []*srtmv1.PublisherGroup)

	// Retire sets whether the topic has moved to other brokers. The node then forwards publishes to the
	// other brokers and accepts no more messages. Retire does nothing if the topic does not exist.
	Retire(topic string, retired bool)

	// Identity returns the identity from the topic's last Prepare; nil: none, or no such topic.
	Identity(topic string) *srtmv1.TopicIdentity

	// Has reports whether the topic exists, and whether the topic was prepared since its creation.
	Has(topic string) (exists, prepared bool)

	// Remove deletes a topic with its channels and messages. If the topic does not exist, Remove does
	// nothing and succeeds. The deletion survives a crash, unless the disk fails.
	Remove(topic string) error

	// RemoveUnused removes a topic without messages and without publishers. Any other topic stays, and
	// RemoveUnused returns an error. With uncreated set, the creation of the topic failed: RemoveUnused
	// first retires the topic, so only messages count as a use. A topic that stays loses its identity
	// and remains retired until the next Prepare, which continues the topic.
	RemoveUnused(topic string, uncreated bool) error

	// Seek moves a channel of a topic to another place. With empty set, Seek discards the channel's
	// messages instead. Seek returns when the change survives a crash. The SeekResult lacks the
	// request.
	Seek(topic, channel string, to *srtmv1.Place, empty bool) *srtmv1.SeekResult

	// Grant replaces the share of a prepared topic. The bucket keeps its tokens and adds granted, cut
	// to the new burst (tokenbucket.Bucket.Retune); released is the excess. The zero Share stops the
	// topic.
	//
	// The node itself reduces the share to base at flexUntil, and to nothing at until. mono.Never: no
	// end. After an error, also for an unknown topic, nothing has changed.
	Grant(topic string, share, base tokenbucket.Share, flexUntil, until mono.Time, granted tokenbucket.Tokens) (released tokenbucket.Tokens, err error)

	// Renew moves flexUntil and until of a topic's share, and reports whether the share still has a
	// flexible part. Renew does not restore an expired part. If the topic does not exist, Renew returns
	// false.
	Renew(topic string, flexUntil, until mono.Time) (flex bool)

	// HoldFrom stops all prepared topics from releasing messages from the given time on. A later
	// HoldFrom replaces the time; before the first, topics release messages. HoldFrom may be called
	// beside any other method.
	HoldFrom(at mono.Time)

	// Report returns the stats since the last call, or since the start, with TopicStats.channels and
	// unprepared set. There is an entry for every existing topic, unless all is false: then Report may
	// omit topics as BrokerReport.changes allows, and returns changes = true. The caller may modify
	// only the intervals.
	Report(all bool) (stats []*srtmv1.TopicStats, changes bool)

	// Capture starts to record the arrival and the publisher of every message that a topic accepts. If
	// a capture is running, Capture restarts the record. If the topic does not exist, Capture returns
	// false. A capture ends with EndCapture or with the topic. The record is bounded; the node counts
	// the excess as lost.
	Capture(topic string) bool
	EndCapture(topic string)

	// Arrivals returns the record since the last call, as a message for the control plane. nil: the
	// topic or its capture has ended. The caller owns the result.
	Arrivals(topic string) *srtmv1.Arrivals

	// Topics returns the names of all topics, in any order.
	Topics() []string
}
