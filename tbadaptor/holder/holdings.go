package holder

import (
	"fmt"
	"maps"
	"slices"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tokenbucket"
)

// maxKept bounds the shares kept for topics that do not exist (yet). A grant
// beyond it is not acknowledged and counted; the adaptor makes it again after
// the next hello.
const maxKept = 10_000

// Grant is what the ledger says, to this process whatever its Broker; Held is what this
// process says it holds.
type (
	Grant = ledger.Grant
	Held  = ledger.Held
)

// Check says what is wrong with a grant that a peer sent.
func Check(g Grant) error {
	if err := g.Share.Validate(); err != nil {
		return err
	}
	if g.Flex.Rate < 0 || g.Flex.Burst < 0 || g.Base().Validate() != nil {
		return fmt.Errorf("%+v cannot be the flexible part of %+v", g.Flex, g.Share)
	}
	most := tokenbucket.Tokens(g.Share.Burst) * tokenbucket.Token
	if g.Tokens < 0 || g.Tokens > most {
		return fmt.Errorf("%d thousandths of a token: want 0 to %d, the burst", g.Tokens, most)
	}
	if g.Epoch == 0 || g.Topic == "" {
		return fmt.Errorf("epoch %d of topic %q: want neither 0 nor empty", g.Epoch, g.Topic)
	}
	return nil
}

// Holding is what this process holds of a topic.
type Holding struct {
	Epoch    uint64 // of the grant that gave it; 0: none did
	Share    tokenbucket.Share
	Flex     tokenbucket.Share // the part of share that ends with the lease
	Prepared bool              // the node has the topic, and this share is in force there
	// What its bucket starts with once it is prepared; until then the share
	// earns nothing.
	tokens tokenbucket.Tokens
}

// Base returns what is left of the share when the lease is over.
func (in Holding) Base() tokenbucket.Share { return in.Share.Less(in.Flex) }

// Holdings is what this process holds of each topic.
//
// A grant and the preparation of its topic come over two sessions, in either
// order: after a restart of the broker or of the loaddistributor the grant may
// be first. It is then accepted and kept, tokens and all, for a share that
// lies here unused is as safe as one of a topic that is silent. (Not to
// acknowledge it until the topic is there was the other way: the adaptor would
// wait for that acknowledgement, and never get it where the topic is gone.)
//
// Invariant: the epoch of a topic never falls while the topic is in the map, unless the
// share is given up, of which the next hello says nothing. A topic leaves the map when it
// is removed, or when it is granted nothing and not prepared.
type Holdings struct {
	topics map[string]Holding
	kept   int // of topics: not prepared
}

// New returns holdings of nothing.
func New() *Holdings { return &Holdings{topics: map[string]Holding{}} }

// Verdict is what to do with a grant.
type Verdict uint8

const (
	InForce Verdict = iota // give it to the node; then applied, and acknowledge
	Kept                   // accepted for later: acknowledge it
	Stale                  // ignored: acknowledge what is in force
	Dropped                // no room: no acknowledgement
)

var names = [...]string{"applied", "kept", "stale", "dropped"}

// String is a label of metrics.
func (v Verdict) String() string { return names[v] }

// Of returns what is held of a topic; the zero Holding: nothing.
func (h *Holdings) Of(topic string) Holding { return h.topics[topic] }

// Topics returns those of which something is held, or that are prepared, by name.
func (h *Holdings) Topics() []string { return slices.Sorted(maps.Keys(h.topics)) }

// Kept returns for how many topics that do not exist a share is kept.
func (h *Holdings) Kept() int { return h.kept }

// Due is when a lease with these ends takes something of what is held.
func (h *Holdings) Due(flexUntil, until mono.Time) mono.Time {
	due := mono.Never
	// order: the least of all
	for _, in := range h.topics {
		if in.Flex != (tokenbucket.Share{}) {
			due = min(due, flexUntil)
		}
		if !in.Share.IsZero() {
			due = min(due, until)
		}
	}
	return due
}

// Offer judges a grant; released is for the acknowledgement of a kept one.
func (h *Holdings) Offer(g Grant) (v Verdict, released tokenbucket.Tokens) {
	in, known := h.topics[g.Topic]
	switch {
	case known && g.Epoch <= in.Epoch:
		return Stale, 0
	case in.Prepared:
		return InForce, 0
	case !known && g.Share.IsZero():
		return Kept, 0 // nothing is what we hold of a topic that is not there
	case !known && h.kept >= maxKept:
		return Dropped, 0
	}
	return Kept, h.Keep(g)
}

// Keep holds g for a topic that is not prepared, and returns the tokens that
// its burst has no room for.
func (h *Holdings) Keep(g Grant) (released tokenbucket.Tokens) {
	all := h.topics[g.Topic].tokens + g.Tokens
	fit := min(all, tokenbucket.Tokens(g.Share.Burst)*tokenbucket.Token)
	h.put(g.Topic, Holding{Epoch: g.Epoch, Share: g.Share, Flex: g.Flex, tokens: fit})
	return all - fit
}

// put replaces what is held of a topic; nothing is held of one that is not prepared and has
// no share.
func (h *Holdings) put(topic string, in Holding) {
	if was, known := h.topics[topic]; known && !was.Prepared {
		h.kept--
	}
	delete(h.topics, topic)
	if in.Prepared || !in.Share.IsZero() {
		if h.topics[topic] = in; !in.Prepared {
			h.kept++
		}
	}
}

// Applied: the node has put g in force.
func (h *Holdings) Applied(g Grant) {
	h.put(g.Topic, Holding{Epoch: g.Epoch, Share: g.Share, Flex: g.Flex, Prepared: true})
}

// Prepared: the node has created the topic. It returns the share kept for it,
// which is to be given to the node; due is false when there is none.
func (h *Holdings) Prepared(topic string) (g Grant, due bool) {
	in, known := h.topics[topic]
	if in.Prepared {
		return Grant{}, false
	}
	h.put(topic, Holding{Epoch: in.Epoch, Share: in.Share, Flex: in.Flex, Prepared: true})
	return Grant{Topic: topic, Epoch: in.Epoch, Share: in.Share, Tokens: in.tokens, Flex: in.Flex}, known
}

// Missing: the node does not have the topic, though it may have been prepared.
// Its share stays ours; the tokens that its bucket held are gone.
func (h *Holdings) Missing(topic string) {
	if in := h.topics[topic]; in.Prepared {
		h.put(topic, Holding{Epoch: in.Epoch, Share: in.Share, Flex: in.Flex})
	}
}

// Vanished: the node turned out not to have the topic that g is for.
func (h *Holdings) Vanished(g Grant) (released tokenbucket.Tokens) {
	h.Removed(g.Topic)
	return h.Keep(g)
}

// GivenUp: nothing is held of the topic any more. The node still has the topic if it was
// prepared, so the next grant is for the node.
func (h *Holdings) GivenUp(topic string) {
	h.put(topic, Holding{Prepared: h.topics[topic].Prepared})
}

// Removed: the node does not have the topic any more.
func (h *Holdings) Removed(topic string) { h.put(topic, Holding{}) }

// Lapse ends what the lease has ended, and returns the topics of which something
// has. A new lease does not bring it back.
func (h *Holdings) Lapse(flexOver, allOver bool) (topics []string) {
	for _, name := range h.Topics() {
		if h.LapseOne(name, flexOver, allOver) {
			topics = append(topics, name)
		}
	}
	return topics
}

// LapseOne is Lapse of one topic, and reports whether something of it has ended.
func (h *Holdings) LapseOne(topic string, flexOver, allOver bool) bool {
	in := h.topics[topic]
	was := in.Share
	if flexOver {
		in.Share, in.Flex = in.Base(), tokenbucket.Share{}
	}
	if allOver {
		in.Share, in.Flex = tokenbucket.Share{}, tokenbucket.Share{}
	}
	if in.Share == was {
		return false
	}
	in.tokens = min(in.tokens, tokenbucket.Tokens(in.Share.Burst)*tokenbucket.Token)
	h.topics[topic] = in
	return true
}

// Reconcile forgets prepared topics that do not exist, and returns what is
// held, by topic.
func (h *Holdings) Reconcile(exist []string) []Held {
	there := make(map[string]bool, len(exist))
	for _, name := range exist {
		there[name] = true
	}
	var list []Held
	for _, name := range h.Topics() {
		in := h.topics[name]
		switch {
		case in.Prepared && !there[name]:
			delete(h.topics, name)
		case in.Epoch > 0:
			list = append(list, Held{Topic: name, Share: in.Share, Flex: in.Flex, Epoch: in.Epoch})
		}
	}
	return list
}
