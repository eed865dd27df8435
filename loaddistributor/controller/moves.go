package controller

import (
	"context"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/reconcile"
)

// A move prepares the new placement before it gives up the old one.
// loaddistributor/reconcile defines the steps, their order, and the roll-back. Afterwards
// the old brokers learn which publishers have moved, and end these connections at a
// message boundary, so that publishers that do not watch reconnect. A reminder follows.
// Publishers that watch get a grace period first. A broker without publishers
// of the topic retires. After consumers have taken its messages, the broker gets the order to
// remove the topic, and does so unless new messages have arrived. If this process crashes
// after the move, publishers that do not watch stay on the old broker, which serves them.

// become returns the new specification and plan of a topic.
type become func(planning) (*catalog.Spec, placement.Plan, error)

// Update replaces the specification of an active topic by the result of change. change
// must not modify its argument, and may be called repeatedly. expected is the required
// epoch of the placement, 0: any. If neither the demand nor the policy changes, no
// publisher moves unless its broker is disconnected. Errors: as in Create, and the errors
// of change; catalog.ErrTopicUnknown, ErrTopicState, *EpochError.
func (c *Controller) Update(ctx context.Context, name string, expected uint64, change func(present *catalog.Spec) (*catalog.Spec, error)) (catalog.Topic, error) {
	return c.relocate(ctx, name, cause{srtmv1.MoveReason_MOVE_REASON_CONTRACT_CHANGE, "update", secure.Caller(ctx)}, func(p planning) (*catalog.Spec, placement.Plan, error) {
		topic := p.topic
		if epoch := topic.Placement.Epoch(); expected != 0 && epoch != expected {
			return nil, placement.Plan{}, &EpochError{Topic: name, Expected: expected, Present: epoch}
		}
		spec, err := change(topic.Spec)
		switch {
		case err != nil:
			return nil, placement.Plan{}, err
		case topic.Spec.Equal(spec):
			return nil, placement.Plan{}, reconcile.ErrSettled
		}
		if err := p.afford(spec); err != nil {
			return nil, placement.Plan{}, err
		}
		if topic.Spec.PlacedAs(spec) && p.intact {
			return spec, topic.Plan, nil
		}
		plan, err := p.replace(spec, nil)
		return spec, plan, err
	})
}

// Publishers selects publishers of a topic: by IDs, or without IDs by Group and From
// together.
type Publishers struct {
	IDs   []string
	Group *string // correlation key; nil: any
	From  string  // present broker; "": any
}

// indices returns the indices of the selected publishers. Error: catalog.ErrPublisherUnknown,
// also for an empty selection.
func (w Publishers) indices(topic catalog.Topic) (selected []int, err error) {
	name := topic.Spec.Name()
	for _, id := range w.IDs {
		i, ok := topic.Placement.Index(id)
		if !ok {
			return nil, fmt.Errorf("topic %s, publisher %q: %w", name, id, catalog.ErrPublisherUnknown)
		}
		selected = append(selected, i)
	}
	if len(w.IDs) > 0 {
		return selected, nil
	}
	for i, p := range topic.Spec.Demand.Expand() {
		if (w.Group == nil || p.Key == *w.Group) && (w.From == "" || topic.Placement.At(i).Broker == w.From) {
			selected = append(selected, i)
		}
	}
	if len(selected) > 0 {
		return selected, nil
	}
	subject := "topic " + name
	if w.Group != nil {
		subject += fmt.Sprintf(", group %q", *w.Group)
	}
	if w.From != "" {
		subject += fmt.Sprintf(", broker %q", w.From)
	}
	return nil, fmt.Errorf("%s: there are no publishers: %w", subject, catalog.ErrPublisherUnknown)
}

// MovePublishers moves publishers of a topic to a broker, which may be new to the topic.
// Errors: catalog.ErrTopicUnknown, ErrPublisherUnknown, ErrTopicState, ErrBrokerUnknown;
// *placement.Infeasible, *BrokerError, *AdaptorError.
func (c *Controller) MovePublishers(ctx context.Context, name string, publishers Publishers, to string) (catalog.Topic, error) {
	return c.relocate(ctx, name, cause{srtmv1.MoveReason_MOVE_REASON_OPERATOR, "publishers", secure.Caller(ctx)}, func(p planning) (*catalog.Spec, placement.Plan, error) {
		topic, brokers := p.topic, p.brokers
		target := slices.IndexFunc(brokers, func(b placement.Broker) bool { return b.ID == to })
		if target < 0 {
			return nil, placement.Plan{}, fmt.Errorf("broker %q is disconnected, draining or unknown: %w", to, catalog.ErrBrokerUnknown)
		}
		moved, err := publishers.indices(topic)
		if err != nil {
			return nil, placement.Plan{}, err
		}
		moved = slices.DeleteFunc(moved, func(i int) bool { return topic.Placement.At(i).Broker == to })
		if len(moved) == 0 {
			return nil, placement.Plan{}, reconcile.ErrSettled
		}
		if n := topic.Placement.Unplaced(); n > 0 {
			return nil, placement.Plan{}, fmt.Errorf("topic %s is being fitted, and has %s without a place: %w", name, plural.Count(n, "publisher"), catalog.ErrTopicState)
		}
		plan, err := placement.Shift(topic.Plan, topic.Spec.Demand, moved, to)
		if err != nil {
			return nil, placement.Plan{}, err
		}
		// Snapshot counts the topic's present rate there as free.
		if need, free := plan.Quotas[plan.On(to)].Rate, brokers[target].Mcap-brokers[target].Allocated; need > free {
			return nil, placement.Plan{}, &placement.Infeasible{Bound: "rcap", Need: need, Have: free}
		}
		return topic.Spec, plan, nil
	})
}

// relocate moves a topic to the result of become and returns the topic. If become returns
// reconcile.ErrSettled, the topic stays. The move continues when ctx ends.
func (c *Controller) relocate(ctx context.Context, name string, cause cause, become become) (now catalog.Topic, err error) {
	var before catalog.Topic
	op := moving(name, cause, func(p planning) (*catalog.Spec, placement.Plan, error) {
		before = p.topic
		return become(p)
	})
	done := make(chan catalog.Topic, 1)
	op.end = func(err error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		topic, _ := c.cat.committed.Topic(name)
		if err == nil && topic.Spec != before.Spec &&
			(!topic.Spec.PlacedAs(before.Spec) || topic.Spec.SLO != before.Spec.SLO || c.tuner.Status(name, time.Now()).Waiting) {
			// Earlier results do not apply to the new specification.
			c.tuning.perform(c.tuner.Begin(name, topic.Spec.Demand, time.Now()))
		}
		done <- topic
	}
	if err := c.owners.request(ctx, op); err != nil {
		return catalog.Topic{}, err
	}
	return <-done, nil
}

// moving returns the operation that moves a topic to the result of become.
func moving(name string, cause cause, become become) operation {
	return operation{name: name, cause: cause, decide: func(p planning) (catalog.Event, error) {
		switch topic := p.topic; {
		case topic.Spec == nil:
			return nil, fmt.Errorf("topic %s: %w", name, catalog.ErrTopicUnknown)
		case !topic.Open():
			return nil, fmt.Errorf("topic %s is %v: %w", name, topic.State, catalog.ErrTopicState)
		}
		spec, plan, err := become(p)
		if err != nil {
			return nil, err
		}
		// The contract must suffice for the brokers of the plan and the retiring brokers.
		if _, _, err := placement.WithRetiring(plan, len(reconcile.Retiring(plan, p.topic))); err != nil {
			return nil, err
		}
		return catalog.NewTopicChanging(p.topic, spec, plan)
	}}
}

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
	reason       srtmv1.MoveReason
	text, caller string // for people
}

// movedPublisher is a move of one publisher. from or to is "" for no broker.
type movedPublisher struct {
	cause               *cause
	time                time.Time
	epoch               uint64
	publisher, from, to string
}

// moveHistory are a topic's moves, oldest first, and the number of forgotten moves before them.
type moveHistory struct {
	list      []movedPublisher
	forgotten uint64
}

// recordMoves adds moves of a topic. total is the number of topics.
func (t *topics) recordMoves(name string, moves []movedPublisher, total int) {
	if len(moves) == 0 {
		return
	}
	m := &t.entry(name).moves
	limit := min(max(maxMoves/max(1, total), minTopicMoves), maxTopicMoves)
	excess := max(0, len(m.list)+len(moves)-limit)
	old := min(excess, len(m.list))
	m.list = slices.Concat(m.list[old:], moves[excess-old:]) // copy, to keep no spare memory
	m.forgotten += uint64(excess)
}

// Moves returns at most limit moves of a topic's publishers, newest first. before is the
// number of the move at which to continue; 0: the newest. next is the value of before for
// the next page, or 0. Error: catalog.ErrTopicUnknown.
func (r *View) Moves(name string, before uint64, limit int) (list []*srtmv1.PublisherMove, next, forgotten uint64, err error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if _, ok := r.cat.committed.Topic(name); !ok {
		return nil, 0, 0, r.knowledge.deny(fmt.Errorf("topic %s: %w", name, catalog.ErrTopicUnknown))
	}
	m := r.topics.peek(name).moves
	list, next = m.page(before, limit)
	return list, next, m.forgotten, nil
}

// page returns a page for Moves. A move's number counts the topic's moves up to and
// including the move.
func (m *moveHistory) page(before uint64, limit int) (list []*srtmv1.PublisherMove, next uint64) {
	end := len(m.list)
	switch {
	case before == 0 || before > m.forgotten+uint64(end):
	case before <= m.forgotten:
		return nil, 0
	default:
		end = int(before - m.forgotten - 1)
	}
	start := max(0, end-limit)
	for _, m := range slices.Backward(m.list[start:end]) {
		list = append(list, &srtmv1.PublisherMove{
			Time: timestamppb.New(m.time), Epoch: m.epoch, PublisherId: m.publisher, From: m.from, To: m.to,
			Reason: m.cause.reason, Why: m.cause.text, By: m.cause.caller,
		})
	}
	if start > 0 {
		next = m.forgotten + uint64(start) + 1
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
	time   time.Time
}

// disconnect orders brokers to disconnect moved publishers, watched publishers after a
// grace period. It remembers the moves and returns the number of moved publishers.
func (c *change) disconnect(old, now *catalog.Placement) int {
	name, start, cause := c.op.name, time.Now(), c.op.cause // a copy, because moves outlive the change
	leaving := map[string][]string{}                        // by the old broker
	var all []movedPublisher
	move := func(publisher, from, to string) {
		all = append(all, movedPublisher{&cause, start, now.Epoch(), publisher, from, to})
		if from != "" {
			leaving[from] = append(leaving[from], publisher)
		}
	}
	count := 0
	for i := range now.Len() {
		a := now.At(i)
		if j, found := old.Index(a.Publisher); found {
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
	c.topics.recordMoves(name, all, c.cat.committed.Len())
	watched := c.topics.watched(name)
	for broker, ids := range leaving {
		var adaptive, stock []string
		for _, id := range ids {
			if c.cfg.Followed || watched(id) {
				adaptive = append(adaptive, id)
			} else {
				stock = append(stock, id)
			}
		}
		c.brokers.disconnect(name, broker, stock)
		for _, r := range []reminder{{broker, stock, time.Now().Add(remindAfter)}, {broker, adaptive, time.Now().Add(followGrace)}} {
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
			if now.Before(r.time) {
				return false
			}
			ids := slices.DeleteFunc(slices.Clone(r.ids), func(id string) bool {
				a, err := m.cat.committed.Resolve(name, id)
				return err == nil && a.Broker == r.broker
			})
			m.brokers.disconnect(name, r.broker, ids)
			return true
		})
	}
}

// read returns, for each of the brokers with a report of the topic, the channels with consumers.
func (b *brokers) read(name string, ids []string) map[string][]string {
	read := map[string][]string{}
	for _, id := range ids {
		if t := b.reported(id).Topic(name); t != nil {
			read[id] = t.Read
		}
	}
	return read
}

func (b *brokers) nudge(name string, n reconcile.Nudge) {
	if s := b.sessions[n.Broker]; s != nil {
		s.out.Put(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Nudge{
			Nudge: &srtmv1.NudgeConsumers{Topic: name, Channels: n.Channels},
		}})
	}
}

// nudgeLate nudges consumers that had not come to new brokers when their topic moved, but not while
// the topic changes again.
func (m *mover) nudgeLate(now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, name := range m.topics.busy {
		l := m.topics.byName[name]
		if l == nil || l.late == nil || l.owner != nil {
			continue
		}
		topic, _ := m.cat.committed.Topic(name)
		nudges, over := l.late.Step(topic.Plan.Brokers(), topic.Retiring, m.brokers.read(name, topic.Holders()), now)
		for _, n := range nudges {
			m.brokers.nudge(name, n)
		}
		if over {
			l.late = nil
		}
	}
}
