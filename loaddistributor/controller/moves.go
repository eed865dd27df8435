package controller

import (
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
)

// Bounds of the moves of publishers that are remembered, of all topics together and of each
// one: the oldest of a topic are forgotten when it gets more.
const (
	maxMoves      = 100_000
	maxTopicMoves = 1000
	minTopicMoves = 20
)

// shownMoves is how many a topic's status has.
const shownMoves = 20

// cause is why publishers are moved, and who asked for it; "": this loaddistributor.
type cause struct {
	reason  srtmv1.MoveReason
	why, by string // for people
}

// moved is a move of one publisher; from or to "": no place.
type moved struct {
	*cause
	at                  time.Time
	epoch               uint64
	publisher, from, to string
}

// moves are those of a topic, oldest first, and how many more were forgotten before.
type moves struct {
	list      []moved
	forgotten uint64
}

// remember adds moves of a topic. Requires: Controller.mu held.
func (st *state) remember(name string, more []moved) {
	if len(more) == 0 {
		return
	}
	m := &st.topics.at(name).moves
	most := min(max(maxMoves/max(1, st.cat.Len()), minTopicMoves), maxTopicMoves)
	over := max(0, len(m.list)+len(more)-most)
	old := min(over, len(m.list))
	m.list = slices.Concat(m.list[old:], more[over-old:]) // no more memory than they take
	m.forgotten += uint64(over)
}

// Moves returns the moves of a topic's publishers, the newest first, at most so many of
// those before the one of that number; 0: the newest. next is for those that follow, 0:
// there are none. Errors: catalog.ErrTopicUnknown.
func (r *reader) Moves(name string, before uint64, most int) (list []*srtmv1.PublisherMove, next, forgotten uint64, err error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if _, ok := r.mu.cat.Topic(name); !ok {
		return nil, 0, 0, r.mu.deny(fmt.Errorf("topic %s: %w", name, catalog.ErrTopicUnknown))
	}
	m := r.mu.topics.see(name).moves
	list, next = m.page(before, most)
	return list, next, m.forgotten, nil
}

// page is what Moves returns. A move's number is how many were made up to it.
func (m *moves) page(before uint64, most int) (list []*srtmv1.PublisherMove, next uint64) {
	end := len(m.list)
	switch {
	case before == 0 || before > m.forgotten+uint64(end):
	case before <= m.forgotten:
		return nil, 0
	default:
		end = int(before - m.forgotten - 1)
	}
	from := max(0, end-most)
	for _, one := range slices.Backward(m.list[from:end]) {
		list = append(list, &srtmv1.PublisherMove{
			Time: timestamppb.New(one.at), Epoch: one.epoch, PublisherId: one.publisher, From: one.from, To: one.to,
			Reason: one.reason, Why: one.why, By: one.by,
		})
	}
	if from > 0 {
		next = m.forgotten + uint64(from) + 1
	}
	return list, next
}
