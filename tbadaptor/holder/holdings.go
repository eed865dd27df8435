// Package holder is the other end of a ledger. It is pure. Holdings records a member's share of each
// contract, and detects stale grants. Lease computes how long the member may use shares without
// contact to the adaptor. nsqd/agent passes messages and the time in, and puts the results in force.
// Read tbadaptor/ledger next: the ledger's proof relies on this package.
package holder

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tokenbucket"
)

// maxKept bounds the shares kept for topics that do not exist yet. A grant beyond maxKept is counted
// and not acknowledged; the adaptor repeats the grant after the next hello.
const maxKept = 10_000

// Grant is a grant to this process, whatever its Broker. HeldShare is a share that this process reports.
type (
	Grant     = ledger.Grant
	HeldShare = ledger.HeldShare
)

// Check validates a grant from a peer.
func Check(g Grant) error {
	if err := g.Share.Validate(); err != nil {
		return err
	}
	if g.Flex.Rate < 0 || g.Flex.Burst < 0 || g.Base().Validate() != nil {
		return fmt.Errorf("%+v cannot be the flexible part of %+v", g.Flex, g.Share)
	}
	limit := tokenbucket.Tokens(g.Share.Burst) * tokenbucket.Token
	if g.Tokens < 0 || g.Tokens > limit {
		return fmt.Errorf("%d thousandths of a token: want 0 to %d, the burst", g.Tokens, limit)
	}
	if g.Epoch == 0 || g.Topic == "" {
		return fmt.Errorf("epoch %d of topic %q: want neither 0 nor empty", g.Epoch, g.Topic)
	}
	return nil
}

// Holding is a share of one topic.
type Holding struct {
	Epoch    uint64 // epoch of the share's grant; 0: no grant
	Share    tokenbucket.Share
	Flex     tokenbucket.Share // part of Share that ends with the lease
	Prepared bool              // the node has the topic with this share in force
	// tokens of the bucket once the topic is prepared; until then the share earns nothing.
	tokens tokenbucket.Tokens
}

// Base returns the share that remains when the lease is over.
func (h Holding) Base() tokenbucket.Share { return h.Share.Less(h.Flex) }

// Holdings has the process's share of each topic.
//
// A grant and the preparation of its topic come over two sessions, in either order. After a restart of
// the broker or of the loaddistributor the grant may be first. The grant is then accepted and kept with
// the tokens: an unused share is as safe as the share of a silent topic. The rejected design did not
// acknowledge the grant until the topic existed; the adaptor would wait for ever if the topic is gone.
//
// Invariant: the epoch of a topic never falls while the topic is in the map, unless the share is given
// up; the next hello omits such a share. A topic leaves the map when it is removed, or when it has no
// share and is not prepared.
type Holdings struct {
	topics         map[string]Holding
	kept           int // topics that are not prepared
	held, flexible int // topics with a share, and with a flexible part
}

// New returns holdings of nothing.
func New() *Holdings { return &Holdings{topics: map[string]Holding{}} }

// Verdict is the treatment of a grant.
type Verdict uint8

const (
	InForce Verdict = iota // pass it to the node, call Applied, acknowledge
	Kept                   // accepted for later: acknowledge
	Stale                  // ignored: acknowledge the share in force
	Dropped                // no room: do not acknowledge
)

var names = [...]string{"applied", "kept", "stale", "dropped"}

// String returns the verdict's label in metrics.
func (v Verdict) String() string { return names[v] }

// Of returns the Holding of a topic; zero if there is none.
func (h *Holdings) Of(topic string) Holding { return h.topics[topic] }

// Topics returns the topics with a share and the prepared topics, sorted by name.
func (h *Holdings) Topics() []string { return slices.Sorted(maps.Keys(h.topics)) }

// Kept returns the number of topics that are not prepared and have a share.
func (h *Holdings) Kept() int { return h.kept }

// NextEnd returns when a lease with these ends takes away a part of the holdings.
func (h *Holdings) NextEnd(flexUntil, baseUntil mono.Time) mono.Time {
	next := mono.Never
	if h.flexible > 0 {
		next = min(next, flexUntil)
	}
	if h.held > 0 {
		next = min(next, baseUntil)
	}
	return next
}

// Offer judges a grant. For a Kept grant, released is the number of released tokens to
// acknowledge.
func (h *Holdings) Offer(g Grant) (v Verdict, released tokenbucket.Tokens) {
	holding, found := h.topics[g.Topic]
	switch {
	case found && g.Epoch <= holding.Epoch:
		return Stale, 0
	case holding.Prepared:
		return InForce, 0
	case !found && g.Share.IsZero():
		return Kept, 0 // no share of an unknown topic: nothing to keep
	case !found && h.kept >= maxKept:
		return Dropped, 0
	}
	return Kept, h.Keep(g)
}

// Keep stores g for a topic that is not prepared. It returns the tokens for which the burst has no
// room.
func (h *Holdings) Keep(g Grant) (released tokenbucket.Tokens) {
	total := h.topics[g.Topic].tokens + g.Tokens
	fitting := min(total, tokenbucket.Tokens(g.Share.Burst)*tokenbucket.Token)
	h.put(g.Topic, Holding{Epoch: g.Epoch, Share: g.Share, Flex: g.Flex, tokens: fitting})
	return total - fitting
}

// put replaces the Holding of a topic. A topic that is not prepared and has no share leaves the map.
func (h *Holdings) put(topic string, holding Holding) {
	h.count(topic, -1)
	delete(h.topics, topic)
	if holding.Prepared || !holding.Share.IsZero() {
		h.topics[topic] = holding
		h.count(topic, 1)
	}
}

// count adds n for a topic in the map to the counts.
func (h *Holdings) count(topic string, n int) {
	holding, found := h.topics[topic]
	if found && !holding.Prepared {
		h.kept += n
	}
	if !holding.Share.IsZero() {
		h.held += n
	}
	if holding.Flex != (tokenbucket.Share{}) {
		h.flexible += n
	}
}

// Applied records that the node has put g in force.
func (h *Holdings) Applied(g Grant) {
	h.put(g.Topic, Holding{Epoch: g.Epoch, Share: g.Share, Flex: g.Flex, Prepared: true})
}

// Prepared records that the node has created the topic. It returns the share kept for the topic, which
// the caller passes to the node. hasGrant is false if there is none.
func (h *Holdings) Prepared(topic string) (g Grant, hasGrant bool) {
	holding, found := h.topics[topic]
	if holding.Prepared {
		return Grant{}, false
	}
	h.put(topic, Holding{Epoch: holding.Epoch, Share: holding.Share, Flex: holding.Flex, Prepared: true})
	return Grant{Topic: topic, Epoch: holding.Epoch, Share: holding.Share, Tokens: holding.tokens, Flex: holding.Flex}, found
}

// Missing records that the node does not have the topic. The share stays; the tokens in the topic's
// bucket are lost.
func (h *Holdings) Missing(topic string) {
	if holding := h.topics[topic]; holding.Prepared {
		h.put(topic, Holding{Epoch: holding.Epoch, Share: holding.Share, Flex: holding.Flex})
	}
}

// Vanished records that the node does not have the topic of g, and keeps g for later.
func (h *Holdings) Vanished(g Grant) (released tokenbucket.Tokens) {
	h.Removed(g.Topic)
	return h.Keep(g)
}

// GivenUp records that the topic's share is given up. A prepared topic stays prepared, so the next
// grant goes to the node.
func (h *Holdings) GivenUp(topic string) {
	h.put(topic, Holding{Prepared: h.topics[topic].Prepared})
}

// Removed records that the node has removed the topic.
func (h *Holdings) Removed(topic string) { h.put(topic, Holding{}) }

// Lapse removes the shares that the lease has ended, and returns the topics. A new lease does not
// restore the shares.
func (h *Holdings) Lapse(flexOver, allOver bool) (topics []string) {
	for _, name := range h.Topics() {
		if h.LapseOne(name, flexOver, allOver) {
			topics = append(topics, name)
		}
	}
	return topics
}

// LapseOne is Lapse for one topic. It reports whether a part of the share has ended.
func (h *Holdings) LapseOne(topic string, flexOver, allOver bool) bool {
	holding := h.topics[topic]
	previous := holding.Share
	if flexOver {
		holding.Share, holding.Flex = holding.Base(), tokenbucket.Share{}
	}
	if allOver {
		holding.Share, holding.Flex = tokenbucket.Share{}, tokenbucket.Share{}
	}
	if holding.Share == previous {
		return false
	}
	holding.tokens = min(holding.tokens, tokenbucket.Tokens(holding.Share.Burst)*tokenbucket.Token)
	h.count(topic, -1)
	h.topics[topic] = holding
	h.count(topic, 1)
	return true
}

// Reconcile forgets prepared topics that do not exist, and returns all shares, sorted by topic.
func (h *Holdings) Reconcile(exist []string) []HeldShare {
	existing := make(map[string]bool, len(exist))
	for _, name := range exist {
		existing[name] = true
	}
	var list []HeldShare
	for _, name := range h.Topics() {
		holding := h.topics[name]
		switch {
		case holding.Prepared && !existing[name]:
			h.put(name, Holding{})
		case holding.Epoch > 0:
			list = append(list, HeldShare{Topic: name, Share: holding.Share, Flex: holding.Flex, Epoch: holding.Epoch})
		}
	}
	return list
}

// shortestRenewal is the minimum time between requests to the adaptor.
const shortestRenewal = 5 * time.Millisecond

// Lease is the time for which this process may use its grants without contact to the adaptor. The lease
// starts with the request. The adaptor counts from the receipt of the request, so the adaptor's lease
// ends later. The zero Lease never began.
type Lease struct {
	Strict bool
	// Requested is the time of the last request.
	Requested mono.Time
	// Ends of the lease; FlexUntil <= allUntil.
	FlexUntil, allUntil mono.Time
	Length              time.Duration // length of the flexible lease; 0: unknown
	// Received is when the newest answer came. Sent is the adaptor's time of sending it; 0: no answer that
	// the adaptor may count on.
	Received mono.Time
	Sent     uint64
	// Noted: the store has a note that the process is alone (see Alone).
	Noted bool
}

// Alone returns the time from which a later process may use this process's bases, if this process ends
// without another answer. The adaptor accepts proof of this process's end, which frees the bases, only
// for half of this time.
func (l *Lease) Alone() mono.Time {
	if l.Length == 0 || l.Strict {
		return mono.Never
	}
	return l.Received.Add(2 * l.Length)
}

// Renew applies the answer to a request made at sent.
func (l *Lease) Renew(sent mono.Time, flex, session time.Duration) {
	l.FlexUntil = max(l.FlexUntil, sent.Add(flex))
	l.allUntil = max(l.allUntil, sent.Add(session))
	l.Length = flex
}

// Ends returns the ends of flexible parts and bases. The base of a broker that is not Strict never
// ends.
func (l *Lease) Ends() (flexUntil, allUntil mono.Time) {
	if l.Strict {
		return l.FlexUntil, l.allUntil
	}
	return l.FlexUntil, mono.Never
}

// Ended reports which parts have ended by now.
func (l *Lease) Ended(now mono.Time) (flex, all bool) {
	flexUntil, allUntil := l.Ends()
	return !now.Before(flexUntil), !now.Before(allUntil)
}

// Request returns when the next request is due: four requests fit into a lease.
func (l *Lease) Request() mono.Time {
	if l.Length == 0 {
		return mono.Never
	}
	return l.Requested.Add(max(l.Length/4, shortestRenewal))
}
