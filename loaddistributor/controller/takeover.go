package controller

import (
	"slices"
	"time"

	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// What a broker had of a replicated topic is not lost with it: another broker, which is asked
// in turn, takes it over.

// takersTurn is how long one broker is asked to take a topic over before it is another's turn.
const takersTurn = 30 * time.Second

// taker returns the broker that is to take over what one that is gone, or may be, has of a
// replicated topic; "": none, or not now.
func (m *mover) taker(topic catalog.Topic, gone catalog.Broker, now time.Time) string {
	if topic.Spec.Durability != catalog.DurabilityReplicated || m.mu.cfg.TakeOverAfter < 0 {
		return ""
	}
	if s := m.mu.sessions[gone.ID]; s != nil {
		if s.has(topic.Spec.Name()) {
			return ""
		} // else it is back, and another has begun to take the topic over
	} else if since, away := m.mu.away[gone.ID]; !away || now.Sub(since) < m.mu.cfg.TakeOverAfter {
		return ""
	}
	var able []string
	for _, id := range topic.Plan.Brokers() {
		if s := m.mu.sessions[id]; s != nil && s.durability == catalog.DurabilityReplicated {
			able = append(able, id)
		}
	}
	if len(able) == 0 || m.unfinished(topic, gone.ID) {
		return ""
	}
	// Not Sub, which is the greatest duration for ever of one that is back.
	turn := (now.Unix() - m.mu.away[gone.ID].Unix()) / int64(takersTurn/time.Second)
	return able[turn%int64(len(able))]
}

// taking is a take-over: which broker was asked, and since when the one that had it is away.
type taking struct {
	by   string
	away time.Time
}

// takes notes that a broker is asked.
func (m *mover) takes(topic, gone, by string) {
	l := m.mu.topics.at(topic)
	if l.taking == nil {
		l.taking = map[string]taking{}
	}
	l.taking[gone] = taking{by, m.mu.away[gone]}
}

// unfinished reports whether the broker that was to take over, and may have got the beginning
// of it, is gone itself: what that one has is taken over first, so that what each publisher
// sent stays in order.
func (m *mover) unfinished(topic catalog.Topic, gone string) bool {
	t := m.mu.topics.see(topic.Spec.Name()).taking[gone]
	return t.by != "" && t.away.Equal(m.mu.away[gone]) && m.mu.sessions[t.by] == nil && slices.Contains(topic.Holders(), t.by)
}

// has reports whether the broker has the topic, or may.
func (s *Session) has(topic string) bool {
	return s.reports.Count() < 2 || s.reports.Has(topic)
}

// without leaves out brokers whose part of a replicated topic is to be taken over: until
// then, they cannot have it anew.
func (st *state) without(brokers []placement.Broker, topic catalog.Topic) []placement.Broker {
	if topic.Spec == nil || topic.Spec.Durability != catalog.DurabilityReplicated {
		return brokers
	}
	return slices.DeleteFunc(brokers, func(b placement.Broker) bool {
		s := st.sessions[b.ID]
		return slices.Contains(topic.Retiring, b.ID) && (s == nil || !s.has(topic.Spec.Name()))
	})
}
