package loop

import (
	"errors"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tbadaptor/share"
)

// tune proposes shares for every topic whose rule is not static.
func (s *Server) tune() {
	now := clock.Mono()
	s.mu.Lock()
	var names []string
	for _, name := range sortedNames(s.mu.topics) {
		if t := s.mu.topics[name]; t.settled && t.rule != share.Static {
			names = append(names, name)
		}
	}
	s.mu.Unlock()
	for _, name := range names {
		result := "proposed"
		err := s.change(reasonRule, func(l *ledger.Ledger) ([]ledger.Grant, error) {
			t := s.mu.topics[name]
			if t == nil || !t.settled {
				result = "removed"
				return nil, nil
			}
			view, _ := l.Topic(name)
			if len(view.Awaited) > 0 {
				result = "awaiting"
				return nil, nil
			}
			target, err := propose(t, view, s.connectedLocked, s.from(now))
			if err != nil {
				result = "impossible"
				return nil, err
			}
			if target == nil {
				result = "nothing_free"
				return nil, nil
			}
			if !worth(view, target) {
				result = "within_band"
				return nil, nil
			}
			return l.Propose(name, target)
		})
		s.metrics.proposals.WithLabelValues(result).Inc()
		if errors.Is(err, errNotLeading) {
			return
		}
		if err != nil {
			s.cfg.Log.Warn("no proposal", obs.KeyTopic, name, obs.KeyError, err)
		}
	}
}

// connectedLocked requires mu held.
func (s *Server) connectedLocked(broker string) bool { return s.mu.sessions[broker] != nil }

// propose asks the topic's rule. Members that are away keep what is reserved
// for them, for they may be using it; the rule divides the rest among the
// others, by the loads from then on. nil: there is nothing to divide, or
// nobody to divide among.
func propose(t *topic, view ledger.TopicView, connected func(broker string) bool, from stamp.Mono) ([]share.Assigned, error) {
	known := make(map[string]ledger.MemberView, len(view.Members))
	for _, m := range view.Members {
		known[m.Broker] = m
	}
	left := t.total()
	var target []share.Assigned
	var loads []share.Load
	for _, broker := range sortedNames(t.members) {
		m, placed := known[broker], t.members[broker]
		if !connected(broker) {
			left.Rate -= m.Reserved.Rate
			left.Burst -= m.Reserved.Burst
			target = append(target, share.Assigned{Broker: broker, Share: m.Reserved})
			continue
		}
		load := share.Load{Broker: broker, Share: m.Target, Publishers: placed.publishers}
		placed.window.Fill(&load, from)
		loads = append(loads, load)
	}
	if len(loads) == 0 || left.Rate <= 0 || left.Burst <= 0 {
		return nil, nil
	}
	rest, err := share.Split(t.rule, left, loads)
	if err != nil {
		return nil, err
	}
	return append(target, rest...), nil
}

// worth reports whether target differs from what is aimed at by more than the
// dead band.
func worth(view ledger.TopicView, target []share.Assigned) bool {
	aimed := make([]share.Assigned, len(view.Members))
	for i, m := range view.Members {
		aimed[i] = share.Assigned{Broker: m.Broker, Share: m.Target}
	}
	return share.Differs(aimed, target)
}
