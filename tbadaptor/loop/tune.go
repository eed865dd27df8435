package loop

import (
	"errors"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/tbadaptor/adaptor"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
)

// tune proposes shares for every topic whose rule is not static. With moving it takes only topics
// whose publishers have just moved.
func (s *Server) tune(moving bool) {
	s.mu.Lock()
	topics := s.mu.machine.Adaptive(clock.Mono(), moving)
	s.mu.Unlock()
	for _, topic := range topics { // mu is free between two topics
		var result string
		err := s.change(reasonRule, func(m *adaptor.Machine) (grants []ledger.Grant, err error) {
			grants, result, err = m.Tune(clock.Mono(), topic)
			return grants, err
		})
		if errors.Is(err, errNotLeading) {
			return
		}
		s.metrics.proposals.WithLabelValues(result).Inc()
		if err != nil {
			s.cfg.Log.Warn("no proposal", obs.KeyTopic, topic, obs.KeyError, err)
		}
	}
}
