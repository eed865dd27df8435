package main

import (
	"context"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/store"
)

// mandate lends the right to act to one instance of a tbadaptor at a time. A mandate is pure; lend runs
// it.
//
// An instance counts its lease from a time of its own, and this side has received that time before it
// lends. So the instance's lease has ended at the latest lease + bound after this side received the
// answer with that time. All loans of earlier leaders of this log have ended lease + bound after this
// leader's start, because the earlier terms had ended by then. Only one instance may act at a time, so
// an instance that reports that it acts may continue.
type mandate struct {
	lease, bound time.Duration // set once
	term         uint64        // at least the term of the newest mandate; above all earlier terms
	holder       string        // instance that may act
	until        mono.Time     // from then on only the holder can act
	response     *srtmv1.LeadResponse
	received     mono.Time // when response arrived
}

// next returns the request at now: a question or a loan.
func (m *mandate) next(now mono.Time) *srtmv1.LeadRequest {
	h := m.response
	if h == nil || h.Instance != m.holder && now.Before(m.until) {
		return &srtmv1.LeadRequest{}
	}
	m.holder = h.Instance
	m.until = max(m.until, m.received.Add(m.lease+m.bound))
	m.term = max(m.term, h.Term) + 1 // the instance may have stopped acting when the request arrives
	return &srtmv1.LeadRequest{Instance: h.Instance, Stamp: h.Stamp, Lease: durationpb.New(m.lease), Term: m.term}
}

// answer records the answer to the last request, received at now.
func (m *mandate) answer(r *srtmv1.LeadResponse, now mono.Time) {
	if r.Leads {
		m.holder = r.Instance
	}
	m.response, m.received = r, now
}

// lend keeps an adaptor acting until ctx or this process's own term ends, and notes whether it acts.
func (m *mandate) lend(ctx context.Context, log *slog.Logger, term store.Term, client srtmv1.GrantServiceClient, health *adaptorHealth) error {
	ticker := time.NewTicker(m.lease / 4)
	defer ticker.Stop()
	for clock.Mono().Before(term.Until()) {
		limit, cancel := context.WithTimeout(ctx, m.lease/2)
		r, err := client.Lead(limit, m.next(clock.Mono()), grpc.WaitForReady(true))
		cancel()
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			m.answer(r, clock.Mono())
		case status.Code(err) == codes.Unimplemented:
			log.Warn("the tbadaptor is of a release that acts without a mandate: never run two")
			health.note(log, true, nil, 0)
			return nil
		default:
			m.response = nil // another instance may answer next
		}
		health.note(log, err == nil && r.Leads, err, max(0, m.until.Sub(clock.Mono())))
		if err == nil && !r.Leads && (m.holder == r.Instance || !m.received.Before(m.until)) {
			continue // lend to the instance at once
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
	}
	return nil
}

// adaptorHealth is the health of a separate tbadaptor, as lend sees it.
type adaptorHealth struct {
	address string                     // set once
	notice  atomic.Pointer[obs.Notice] // nil: the tbadaptor acts, or lend has no answer yet; written by lend
}

// Err returns nil, or an obs.Notice with the consequences: this process works, and a restart would not
// help.
func (h *adaptorHealth) Err() error {
	if n := h.notice.Load(); n != nil {
		return *n
	}
	return nil
}

// note records whether the tbadaptor acts, and if not, why: another instance may act for wait. It logs
// changes.
func (h *adaptorHealth) note(log *slog.Logger, acts bool, err error, wait time.Duration) {
	acted := h.notice.Load() == nil
	if acts {
		h.notice.Store(nil)
		if !acted {
			log.Info("the tbadaptor acts")
		}
		return
	}
	const consequence = ": brokers release by the bases of their shares, and contracts do not change"
	n := obs.Notice("the tbadaptor at " + h.address + " does not act yet, for at most " + wait.String() + consequence)
	if err != nil {
		n = obs.Notice("the tbadaptor does not answer at " + h.address + " (" + strings.ReplaceAll(err.Error(), "\n", " ") + ")" + consequence +
			"; start the tbadaptor, or correct --tbadaptor-address")
	}
	h.notice.Store(&n)
	switch {
	case !acted:
	case err != nil:
		log.Warn("the tbadaptor does not answer", obs.KeyError, err)
	default:
		log.Info("the tbadaptor does not act yet", "wait", wait)
	}
}
