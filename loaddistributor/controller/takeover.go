package controller

import (
	"slices"
	"time"

	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// If a broker is gone, its messages of a replicated topic are not lost: another broker
// takes them over. Able brokers are asked in turn.

// takersTurn is the time for one broker to take a topic over before the next broker is
// asked.
const takersTurn = 30 * time.Second

// taker returns the broker to ask now to take over a replicated topic from a broker that
// is gone or may be gone; "": none.
func (m *mover) taker(topic catalog.Topic, gone catalog.Broker, now time.Time) string {
	if topic.Spec.Durability != catalog.DurabilityReplicated || m.cfg.TakeOverAfter < 0 {
		return ""
	}
	if s := m.brokers.sessions[gone.ID]; s != nil {
		if s.has(topic.Spec.Name()) {
			return ""
		} // else the broker is back, and another broker has begun the take-over
	} else if since, away := m.brokers.away[gone.ID]; !away || now.Sub(since) < m.cfg.TakeOverAfter {
		return ""
	}
	var able []string
	for _, id := range topic.Plan.Brokers() {
		if s := m.brokers.sessions[id]; s != nil && s.durability == catalog.DurabilityReplicated {
			able = append(able, id)
		}
	}
	if len(able) == 0 || m.unfinished(topic, gone.ID) {
		return ""
	}
	// Not Sub: for a broker that is back, away is zero, and Sub would saturate.
	turn := (now.Unix() - m.brokers.away[gone.ID].Unix()) / int64(takersTurn/time.Second)
	return able[turn%int64(len(able))]
}

// taking is a take-over: the broker that was asked, and when the former broker
// disconnected.
type taking struct {
	by   string
	away time.Time
}

// takes records that a broker was asked.
func (m *mover) takes(topic, gone, by string) {
	l := m.topics.entry(topic)
	if l.taking == nil {
		l.taking = map[string]taking{}
	}
	l.taking[gone] = taking{by, m.brokers.away[gone]}
}

// unfinished reports whether the broker that was asked, and may have part of the
// messages, is itself gone. Its messages are taken over first, to keep each publisher's
// order.
func (m *mover) unfinished(topic catalog.Topic, gone string) bool {
	t := m.topics.peek(topic.Spec.Name()).taking[gone]
	return t.by != "" && t.away.Equal(m.brokers.away[gone]) && m.brokers.sessions[t.by] == nil && slices.Contains(topic.Holders(), t.by)
}

// has reports whether the broker has or may have the topic.
func (s *Session) has(topic string) bool {
	return s.reports.Count() < 2 || s.reports.Has(topic)
}

// without removes brokers whose part of a replicated topic must be taken over. Until then
// they cannot be members again.
func (bs *brokers) without(brokers []placement.Broker, topic catalog.Topic) []placement.Broker {
	if topic.Spec == nil || topic.Spec.Durability != catalog.DurabilityReplicated {
		return brokers
	}
	return slices.DeleteFunc(brokers, func(b placement.Broker) bool {
		s := bs.sessions[b.ID]
		return slices.Contains(topic.Retiring, b.ID) && (s == nil || !s.has(topic.Spec.Name()))
	})
}
