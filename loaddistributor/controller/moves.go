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

// remember adds moves of a topic. Requires: the lock held.
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

// drainPiece is how many publishers one DrainPublishers names.
const drainPiece = 1000

// remindAfter is when a broker is told again. A stock publisher may have been
// told of its old broker just before the move, and have come there just after
// the broker has disconnected the others: nothing else would bring it back.
const remindAfter = 2 * time.Second

// followGrace is how long publishers that a client watches have to follow a move
// before their old broker is told to end their connections, which it is when the
// controller next looks (Config.ReportInterval). They know where to go: to end them
// at once would have them send again what is on its way. All others learn of the
// move by the end of their connection.
const followGrace = time.Second

// reminder is publishers that a broker is to be told to disconnect, or told again.
type reminder struct {
	broker string
	ids    []string
	at     time.Time
}

// disconnect tells brokers which publishers have moved away, those that are watched
// after a grace, remembers who moved, and returns how many.
func (c *change) disconnect(old, now *catalog.Placement) int {
	name, at, cause := c.op.name, time.Now(), c.op.cause // which outlives the change
	leaving := map[string][]string{}                     // by the broker they come from
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
	// Those that are in the topic no more have no business with it either.
	for i := range old.Len() {
		a := old.At(i)
		if now.Of(a.Publisher).Unknown && a.Broker != "" {
			move(a.Publisher, a.Broker, "")
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.remember(name, all)
	watched := c.mu.watched(name)
	for broker, ids := range leaving {
		var follow, stock []string
		for _, id := range ids {
			if c.cfg.Followed || watched(id) {
				follow = append(follow, id)
			} else {
				stock = append(stock, id)
			}
		}
		c.mu.disconnect(name, broker, stock)
		for _, r := range []reminder{{broker, stock, time.Now().Add(remindAfter)}, {broker, follow, time.Now().Add(followGrace)}} {
			if len(r.ids) > 0 {
				l := c.mu.topics.at(name)
				l.reminders = append(l.reminders, r)
			}
		}
	}
	return count
}

func (b *brokers) disconnect(name, broker string, ids []string) {
	s := b.sessions[broker]
	if s == nil {
		return // away; publishers that linger there are seen when it is back and retires
	}
	for piece := range slices.Chunk(ids, drainPiece) {
		s.out.Put(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Drain{
			Drain: &srtmv1.DrainPublishers{Topic: name, ClientIds: piece},
		}})
	}
}

// remind tells brokers again what is due, without those who have come back.
func (o *owners) remind(now time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, name := range o.mu.wanting {
		l := o.mu.topics[name]
		if l == nil {
			continue
		}
		l.reminders = slices.DeleteFunc(l.reminders, func(r reminder) bool {
			if now.Before(r.at) {
				return false
			}
			ids := slices.DeleteFunc(slices.Clone(r.ids), func(id string) bool {
				a, err := o.mu.cat.Resolve(name, id)
				return err == nil && a.Broker == r.broker
			})
			o.mu.disconnect(name, r.broker, ids)
			return true
		})
	}
}
