package loop

import (
	"errors"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tbadaptor/share"
)

// tune proposes shares for every topic whose rule is not static; following: only for
// those whose publishers have just moved.
func (s *Server) tune(following bool) {
	s.mu.Lock()
	var names []string
	for _, name := range sortedNames(s.mu.topics) {
		if t := s.mu.topics[name]; t.settled && t.rule != share.Static && (!following || t.tuner.Following(clock.Mono())) {
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
			target, err := s.proposeLocked(t, view)
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

// proposeLocked asks the topic's rule. nil: nothing is to change. Requires: mu held.
func (s *Server) proposeLocked(t *topic, view ledger.TopicView) ([]share.Assigned, error) {
	known := make(map[string]ledger.MemberView, len(view.Members))
	for _, m := range view.Members {
		known[m.Broker] = m
	}
	return t.tuner.Propose(clock.Mono(), t.total(), func(broker string) share.Holding {
		m := known[broker]
		return share.Holding{Away: s.mu.sessions[broker] == nil, Target: m.Target, Reserved: m.Reserved}
	})
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
