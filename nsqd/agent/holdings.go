package agent

import (
	"fmt"
	"maps"
	"slices"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/shareproto"
	"github.com/srtm-io/srtm/tokenbucket"
)

// maxKept bounds the shares kept for topics that do not exist (yet). A grant
// beyond it is not acknowledged and counted; the adaptor makes it again after
// the next hello.
const maxKept = 10_000

// grant is a srtmv1.Grant, checked.
type grant struct {
	topic  string
	epoch  uint64
	share  tokenbucket.Share
	tokens tokenbucket.Tokens
	// flex is the part of share that ends with the lease.
	flex tokenbucket.Share
}

func (g grant) base() tokenbucket.Share { return less(g.share, g.flex) }

func less(a, b tokenbucket.Share) tokenbucket.Share {
	return tokenbucket.Share{Rate: a.Rate - b.Rate, Burst: a.Burst - b.Burst}
}

func checkGrant(p *srtmv1.Grant) (grant, error) {
	share, flex := shareproto.From(p.GetShare()), shareproto.From(p.GetFlex())
	if err := share.Validate(); err != nil {
		return grant{}, err
	}
	if flex.Rate < 0 || flex.Burst < 0 || less(share, flex).Validate() != nil {
		return grant{}, fmt.Errorf("%+v cannot be the flexible part of %+v", flex, share)
	}
	most := tokenbucket.Tokens(share.Burst) * tokenbucket.Token
	tokens := tokenbucket.Tokens(p.GetTokensMilli())
	if tokens < 0 || tokens > most {
		return grant{}, fmt.Errorf("%d thousandths of a token: want 0 to %d, the burst", tokens, most)
	}
	if p.GetEpoch() == 0 || p.GetTopic() == "" {
		return grant{}, fmt.Errorf("epoch %d of topic %q: want neither 0 nor empty", p.GetEpoch(), p.GetTopic())
	}
	return grant{topic: p.GetTopic(), epoch: p.GetEpoch(), share: share, tokens: tokens, flex: flex}, nil
}

// holding is what this process holds of a topic.
type holding struct {
	epoch    uint64 // of the grant that gave it; 0: none did
	share    tokenbucket.Share
	flex     tokenbucket.Share // the part of share that ends with the lease
	prepared bool              // the node has the topic, and this share is in force there
	// What its bucket starts with once it is prepared; until then the share
	// earns nothing.
	tokens tokenbucket.Tokens
}

func (in holding) base() tokenbucket.Share { return less(in.share, in.flex) }

// holdings is what this process holds of each topic. It is pure.
//
// A grant and the preparation of its topic come over two sessions, in either
// order: after a restart of the broker or of the loaddistributor the grant may
// be first. It is then accepted and kept, tokens and all, for a share that
// lies here unused is as safe as one of a topic that is silent. (Not to
// acknowledge it until the topic is there was the other way: the adaptor would
// wait for that acknowledgement, and never get it where the topic is gone.)
//
// Invariant: the epoch of a topic never falls while the topic is in the map;
// it leaves when it is removed, or when it is granted nothing and not prepared.
type holdings struct {
	topics map[string]holding
	kept   int // of topics: not prepared
}

func newHoldings() *holdings { return &holdings{topics: map[string]holding{}} }

// verdict is what to do with a grant.
type verdict uint8

const (
	inForce verdict = iota // give it to the node; then applied, and acknowledge
	kept                   // accepted for later: acknowledge it
	stale                  // ignored: acknowledge what is in force
	dropped                // no room: no acknowledgement
)

var verdictNames = [...]string{"applied", "kept", "stale", "dropped"}

// offer judges a grant; released is for the acknowledgement of a kept one.
func (h *holdings) offer(g grant) (v verdict, released tokenbucket.Tokens) {
	in, known := h.topics[g.topic]
	switch {
	case known && g.epoch <= in.epoch:
		return stale, 0
	case in.prepared:
		return inForce, 0
	case !known && g.share.IsZero():
		return kept, 0 // nothing is what we hold of a topic that is not there
	case !known && h.kept >= maxKept:
		return dropped, 0
	}
	return kept, h.keep(g)
}

// keep holds g for a topic that is not prepared, and returns the tokens that
// its burst has no room for.
func (h *holdings) keep(g grant) (released tokenbucket.Tokens) {
	in, known := h.topics[g.topic]
	if known && !in.prepared {
		h.kept--
	}
	delete(h.topics, g.topic)
	all := in.tokens + g.tokens
	fit := min(all, tokenbucket.Tokens(g.share.Burst)*tokenbucket.Token)
	if !g.share.IsZero() {
		h.topics[g.topic] = holding{epoch: g.epoch, share: g.share, flex: g.flex, tokens: fit}
		h.kept++
	}
	return all - fit
}

// applied: the node has put g in force.
func (h *holdings) applied(g grant) {
	h.topics[g.topic] = holding{epoch: g.epoch, share: g.share, flex: g.flex, prepared: true}
}

// prepared: the node has created the topic. It returns the share kept for it,
// which is to be given to the node; due is false when there is none.
func (h *holdings) prepared(topic string) (g grant, due bool) {
	in, known := h.topics[topic]
	if in.prepared {
		return grant{}, false
	}
	if known {
		h.kept--
	}
	h.topics[topic] = holding{epoch: in.epoch, share: in.share, flex: in.flex, prepared: true}
	return grant{topic, in.epoch, in.share, in.tokens, in.flex}, known
}

// missing: the node does not have the topic, though it may have been prepared.
// Its share stays ours; the tokens that its bucket held are gone.
func (h *holdings) missing(topic string) {
	in := h.topics[topic]
	if !in.prepared {
		return
	}
	delete(h.topics, topic)
	if !in.share.IsZero() {
		h.topics[topic] = holding{epoch: in.epoch, share: in.share, flex: in.flex}
		h.kept++
	}
}

// vanished: the node turned out not to have the topic that g is for.
func (h *holdings) vanished(g grant) (released tokenbucket.Tokens) {
	delete(h.topics, g.topic)
	return h.keep(g)
}

// removed: the node does not have the topic any more.
func (h *holdings) removed(topic string) {
	if in, known := h.topics[topic]; known && !in.prepared {
		h.kept--
	}
	delete(h.topics, topic)
}

// lapse ends what the lease has ended, and returns the topics of which something
// has. A new lease does not bring it back.
func (h *holdings) lapse(flexOver, allOver bool) (topics []string) {
	for _, name := range slices.Sorted(maps.Keys(h.topics)) {
		if h.lapseOne(name, flexOver, allOver) {
			topics = append(topics, name)
		}
	}
	return topics
}

func (h *holdings) lapseOne(topic string, flexOver, allOver bool) bool {
	in := h.topics[topic]
	was := in.share
	if flexOver {
		in.share, in.flex = in.base(), tokenbucket.Share{}
	}
	if allOver {
		in.share, in.flex = tokenbucket.Share{}, tokenbucket.Share{}
	}
	if in.share == was {
		return false
	}
	in.tokens = min(in.tokens, tokenbucket.Tokens(in.share.Burst)*tokenbucket.Token)
	h.topics[topic] = in
	return true
}

// reconcile forgets prepared topics that do not exist, and returns what is
// held, by topic.
func (h *holdings) reconcile(exist []string) []*srtmv1.HeldShare {
	there := make(map[string]bool, len(exist))
	for _, name := range exist {
		there[name] = true
	}
	var list []*srtmv1.HeldShare
	for _, name := range slices.Sorted(maps.Keys(h.topics)) {
		in := h.topics[name]
		switch {
		case in.prepared && !there[name]:
			delete(h.topics, name)
		case in.epoch > 0:
			list = append(list, &srtmv1.HeldShare{Topic: name, Share: shareproto.To(in.share), Flex: shareproto.To(in.flex), Epoch: in.epoch})
		}
	}
	return list
}
