package controller

import (
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
)

// Limits of the remembered moves of publishers, for all topics together and for each
// topic. Beyond the limit the oldest moves of a topic are forgotten.
const (
	maxMoves      = 100_000
	maxTopicMoves = 1000
	minTopicMoves = 20
)

// shownMoves is the number of moves in a topic's status.
const shownMoves = 20

// cause is the reason of a move and its requester; by is "" for this loaddistributor.
type cause struct {
	reason  srtmv1.MoveReason
	why, by string // for people
}

// moved is a move of one publisher. from or to is "" for no broker.
type moved struct {
	*cause
	at                  time.Time
	epoch               uint64
	publisher, from, to string
}

// moves are a topic's moves, oldest first, and the number of forgotten moves before them.
type moves struct {
	list      []moved
	forgotten uint64
}

// remember adds moves of a topic. total is the number of topics.
func (t *topics) remember(name string, more []moved, total int) {
	if len(more) == 0 {
		return
	}
	m := &t.entry(name).moves
	most := min(max(maxMoves/max(1, total), minTopicMoves), maxTopicMoves)
	over := max(0, len(m.list)+len(more)-most)
	old := min(over, len(m.list))
	m.list = slices.Concat(m.list[old:], more[over-old:]) // copy, to keep no spare memory
	m.forgotten += uint64(over)
}

// Moves returns at most most moves of a topic's publishers, newest first. before is the
// number of the move at which to continue; 0: the newest. next is the value of before for
// the next page, or 0. Error: catalog.ErrTopicUnknown.
func (r *View) Moves(name string, before uint64, most int) (list []*srtmv1.PublisherMove, next, forgotten uint64, err error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if _, ok := r.cat.shown.Topic(name); !ok {
		return nil, 0, 0, r.knowledge.deny(fmt.Errorf("topic %s: %w", name, catalog.ErrTopicUnknown))
	}
	m := r.topics.peek(name).moves
	list, next = m.page(before, most)
	return list, next, m.forgotten, nil
}

// page returns a page for Moves. A move's number counts the topic's moves up to and
// including the move.
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

// drainPiece is the maximum number of publishers in one DrainPublishers.
const drainPiece = 1000

// remindAfter is the delay of the reminder. A publisher without our library may have
// looked up its old broker just before the move, and connected just after the broker
// disconnected the others. Without the reminder it would stay.
const remindAfter = 2 * time.Second

// followGrace is the time for watched publishers to follow a move before their old broker
// must end their connections, at the controller's next tick (Config.ReportInterval).
// Watched publishers know the new broker. An immediate disconnection would make them
// resend messages in flight. Other publishers learn of the move by the disconnection.
const followGrace = time.Second

// reminder lists publishers that a broker must disconnect, first or again.
type reminder struct {
	broker string
	ids    []string
	at     time.Time
}

// disconnect tells brokers to disconnect moved publishers, watched publishers after a
// grace period. It remembers the moves and returns the number of moved publishers.
func (c *change) disconnect(old, now *catalog.Placement) int {
	name, at, cause := c.op.name, time.Now(), c.op.cause // a copy, because moves outlive the change
	leaving := map[string][]string{}                     // by the old broker
	var all []moved
	move := func(publisher, from, to string) {
		all = append(all, moved{&cause, at, now.Epoch(), publisher, from, to})
		if from != "" {
			leaving[from] = append(leaving[from], publisher)
		}
	}
	count := 0
	for i := range now.Len() {
		a := now.At(i)
		if j, known := old.Index(a.Publisher); known {
			if from := old.At(j).Broker; from != a.Broker {
				move(a.Publisher, from, a.Broker)
				count++
			}
		}
	}
	// Publishers that have left the topic must be disconnected, too.
	for i := range old.Len() {
		a := old.At(i)
		if now.Of(a.Publisher).Unknown && a.Broker != "" {
			move(a.Publisher, a.Broker, "")
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.topics.remember(name, all, c.cat.shown.Len())
	watched := c.topics.watched(name)
	for broker, ids := range leaving {
		var follow, stock []string
		for _, id := range ids {
			if c.cfg.Followed || watched(id) {
				follow = append(follow, id)
			} else {
				stock = append(stock, id)
			}
		}
		c.brokers.disconnect(name, broker, stock)
		for _, r := range []reminder{{broker, stock, time.Now().Add(remindAfter)}, {broker, follow, time.Now().Add(followGrace)}} {
			if len(r.ids) > 0 {
				l := c.topics.entry(name)
				l.reminders = append(l.reminders, r)
			}
		}
	}
	return count
}

func (b *brokers) disconnect(name, broker string, ids []string) {
	s := b.sessions[broker]
	if s == nil {
		return // disconnected; remaining publishers show when the broker is back and retires
	}
	for piece := range slices.Chunk(ids, drainPiece) {
		s.out.Put(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Drain{
			Drain: &srtmv1.DrainPublishers{Topic: name, ClientIds: piece},
		}})
	}
}

// remind sends due reminders, without publishers that have moved back.
func (m *mover) remind(now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, name := range m.topics.busy {
		l := m.topics.byName[name]
		if l == nil {
			continue
		}
		l.reminders = slices.DeleteFunc(l.reminders, func(r reminder) bool {
			if now.Before(r.at) {
				return false
			}
			ids := slices.DeleteFunc(slices.Clone(r.ids), func(id string) bool {
				a, err := m.cat.shown.Resolve(name, id)
				return err == nil && a.Broker == r.broker
			})
			m.brokers.disconnect(name, r.broker, ids)
			return true
		})
	}
}
