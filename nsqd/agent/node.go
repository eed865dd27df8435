package agent

import (
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/expiry"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Node is the broker as the control plane sees it. The agent calls it from one
// goroutine at a time; the node's own work goes on meanwhile, so the calls
// must be safe beside it, and none may wait for a client or for the network.
type Node interface {
	// Prepare creates a topic and its channels, rate limited and without a
	// share: it accepts messages and releases none. A topic that is there
	// already gets the missing channels, the SLO and the policy, and keeps its
	// messages and, if it is limited, its share; one that was not limited
	// becomes limited, with an empty share. quantile lies in (0, 1), slo is
	// positive. identity, unless it is nil, is kept with the topic. The topic then has
	// the durable channels that are given, of a version of the catalog, and those that
	// are returned: durable channels that were created here and that the control plane
	// has not named since. The error goes to the operator who creates the topic.
	Prepare(topic string, channels []*srtmv1.TopicChannel, version uint64, slo time.Duration, quantile float64, overLimit srtmv1.OverLimitPolicy, identity *srtmv1.TopicIdentity) (unknown []*srtmv1.TopicChannel, err error)

	// ChangeChannels creates, pauses and deletes durable channels of a topic. It returns when
	// the change stands after a crash. After an error the deletions are carried out or not, and
	// nothing else is. It does nothing, and succeeds, when there is no such topic, or another
	// one of its name. It waits for the disk, so the agent calls it beside the other methods:
	// not beside Prepare, Remove, RemoveUnused and Seek, and once at a time for a topic.
	ChangeChannels(order *srtmv1.ChannelOrder) error

	// Settled notes that all connected brokers of the topic have these channels.
	Settled(topic string, channels []string)

	// Expire sets when messages of a topic that was prepared are given up.
	Expire(topic string, e expiry.Settings, channels map[string]expiry.Settings) error

	// Pace replaces what a prepared topic does about publishers that send more than
	// their part, and what the groups of them may weigh.
	Pace(topic string, mode srtmv1.PacingMode, weights []*srtmv1.PublisherGroup)

	// Retire says whether the topic has moved to other brokers: then it takes no more messages
	// here, and what is published is passed on. It does nothing without such a topic.
	Retire(topic string, retired bool)

	// Identity returns what the topic was last prepared with; nil: it has none, or
	// there is no such topic.
	Identity(topic string) *srtmv1.TopicIdentity

	// Prepared reports whether the topic is there, and was prepared since it was created.
	Prepared(topic string) bool

	// Remove deletes a topic with its channels and the messages they hold. It
	// does nothing, and succeeds, when there is no such topic. After a crash it is
	// deleted still, unless the disk fails.
	Remove(topic string) error

	// RemoveUnused is Remove of a topic that holds no message and that no
	// connection publishes to. Any other stays, whole, and that is an error.
	RemoveUnused(topic string) error

	// Seek has a channel of a topic go on from another place or, with empty, discard
	// what it holds. It returns when that stands after a crash. The SeekResult lacks
	// the request.
	Seek(topic, channel string, to *srtmv1.Place, empty bool) *srtmv1.SeekResult

	// Grant replaces the share of a prepared topic. The bucket keeps the tokens
	// it has and adds granted, cut to the new burst (tokenbucket.Bucket.Retune);
	// released is what did not fit. The zero Share stops the topic. From
	// flexUntil on only base is left of the share, and nothing from until on, each
	// counted from that instant by the node itself; mono.Never: it does not end.
	// After an error, that of an unknown topic included, nothing has changed.
	Grant(topic string, share, base tokenbucket.Share, flexUntil, until mono.Time, granted tokenbucket.Tokens) (released tokenbucket.Tokens, err error)

	// Renew moves those ends of a topic's share, and reports whether it still has
	// more than its base: what has ended does not come back. False if there is no
	// such topic.
	Renew(topic string, flexUntil, until mono.Time) (flex bool)

	// HoldFrom has no message of a prepared topic leave from then on, until a later HoldFrom
	// moves that time; at first none is held. It may be called beside any other method.
	HoldFrom(at mono.Time)

	// Report returns what happened since the last call (since the start, at the
	// first), one entry for every topic that exists now, limited or not, idle or
	// not, with TopicStats.channels and unprepared set. Unless all are wanted, it may leave topics out
	// as BrokerReport.changes allows, and says so. The caller changes nothing of the
	// result but intervals.
	Report(all bool) (stats []*srtmv1.TopicStats, changes bool)

	// Capture records from now on of every message that a topic accepts when it
	// arrived and from whom, anew if it does already; false if there is no such
	// topic. It ends with EndCapture, or with the topic. What is not taken is
	// bounded, and counted as lost.
	Capture(topic string) bool
	EndCapture(topic string)

	// Arrivals returns what was recorded since the last call, as the control plane
	// is to get it; nil if the topic, or its capture, is gone. The caller owns the
	// result.
	Arrivals(topic string) *srtmv1.Arrivals

	// Topics returns the names of the topics that exist now, in any order.
	Topics() []string
}
