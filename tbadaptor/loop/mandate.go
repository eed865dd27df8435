package loop

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
)

// mandate is a Term that Lead lends. It is several terms in turn, with gaps between the terms.
type mandate struct {
	instance string // set once
	// Atomic: Lead writes with Server.mu held, all goroutines read. A stale until is an earlier end;
	// number changes only while the term is over.
	number atomic.Uint64
	until  atomic.Int64 // mono.Time
}

// Number implements Term.
func (m *mandate) Number() uint64 { return m.number.Load() }

// Until implements Term.
func (m *mandate) Until() mono.Time { return mono.Time(m.until.Load()) }

// maxMandate is the longest lease that Lead lends.
const maxMandate = time.Hour

// Lead implements srtmv1.GrantServiceServer.
func (s *Server) Lead(_ context.Context, req *srtmv1.LeadRequest) (*srtmv1.LeadResponse, error) {
	m := s.mandate
	if m == nil {
		return nil, toStatus(errOwnTerm)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.lastLead = clock.Mono()
	leads := s.leadsLocked() == nil // a term that is over is not extended
	now := clock.Mono()
	stamp, lease := mono.Time(req.Stamp), req.Lease.AsDuration()
	if req.Instance == m.instance {
		if stamp <= 0 || stamp > now || lease <= 0 || lease > maxMandate {
			var bad badRequest
			bad.Add("lease", "%v from %d on, it is %d now: want up to %v from a time that it has sent", lease, req.Stamp, now, maxMandate)
			return nil, toStatus(bad)
		}
		until := stamp.Add(lease)
		switch {
		case leads:
			m.until.Store(int64(max(m.Until(), until)))
		case !now.Before(until):
			// Too late to lead; the response shows this.
		case req.Term <= m.Number():
			return nil, toStatus(fmt.Errorf("%w: it has acted in term %d, and term %d is to begin", errOldTerm, m.Number(), req.Term))
		default:
			m.number.Store(req.Term)
			m.until.Store(int64(until))
			s.mu.stopped, leads = false, true
			s.emptyLocked()
			s.cfg.Log.Info("leading", "term", req.Term)
		}
	}
	return &srtmv1.LeadResponse{Instance: m.instance, Stamp: uint64(now), Leads: leads, Term: m.Number()}, nil
}

// Health returns nil while this adaptor acts. Otherwise Health returns an obs.Notice: the adaptor waits
// for a mandate, and a restart would not help.
func (s *Server) Health() error {
	s.mu.Lock()
	acts, lastAsked, start := s.leadsLocked() == nil, s.mu.lastLead, s.mu.ledgerStart
	s.mu.Unlock()
	const consequence = "it grants no shares, and messages leave by the bases of shares"
	switch {
	case acts:
		return nil
	case s.mandate == nil:
		return obs.Notice("this adaptor does not lead any more: " + consequence)
	case lastAsked == 0:
		return obs.Notice("no loaddistributor has asked this adaptor to act since " + start.UTC().Format("2006-01-02 15:04:05") + " UTC: " + consequence +
			"; start a loaddistributor with the address of this adaptor in --tbadaptor-address")
	}
	return obs.Notice(fmt.Sprintf("this adaptor does not act, and a loaddistributor asked last %v ago: %s; a mandate comes from a loaddistributor that leads, once the mandate of any other adaptor is over",
		clock.Mono().Sub(lastAsked).Round(time.Second), consequence))
}
