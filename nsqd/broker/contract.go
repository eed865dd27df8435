package broker

import (
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsqd/metadata"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/tokenbucket"
)

// terms hold a topic's contract and SLO.
type terms struct {
	runner *runner // set once

	// Guarded by mu.
	slo      SLO
	contract *metadata.Contract // recorded contract; replaced, never modified. Nil: no contract, or a preset
}

// Limit puts the topic under a contract without a share: the topic accepts messages, but
// releases none until it has a share. A topic that is already limited keeps its share.
func (t *terms) Limit(slo SLO, reject bool) {
	t.runner.do(func(mono.Time, *step) {
		t.slo = slo
		t.runner.metrics.slo.Store(int64(slo.Latency))
		t.runner.mu.core.Limit(t.overLimit(reject))
	})
}

func (t *terms) overLimit(reject bool) queue.OverLimit {
	return queue.OverLimit{Reject: reject, MaxDelay: t.runner.shared.cfg.RejectAfter}
}

// SetLeased replaces the share for the term of the lease, adds the granted tokens, and
// returns the tokens given up. The topic is limited from then on.
func (t *terms) SetLeased(share tokenbucket.Share, lease queue.Lease, granted tokenbucket.Tokens) (released tokenbucket.Tokens) {
	t.runner.do(func(now mono.Time, s *step) {
		if !t.runner.mu.core.Contract().Limited() {
			t.runner.mu.core.Limit(t.overLimit(false))
		}
		released = t.runner.mu.core.SetLeased(now, share, lease, granted, &s.fx)
	})
	return released
}

// Renew extends the share's lease, and reports whether the lease has a flexible part that
// has not expired.
func (t *terms) Renew(flexUntil, until mono.Time) (flex bool) {
	t.runner.do(func(now mono.Time, s *step) {
		flex = t.runner.mu.core.Contract().Limited() && t.runner.mu.core.Renew(now, flexUntil, until, &s.fx)
	})
	return flex
}

// Limit is terms.Limit.
func (t *Topic) Limit(slo SLO, reject bool) { t.terms.Limit(slo, reject) }

// SetLeased is terms.SetLeased.
func (t *Topic) SetLeased(share tokenbucket.Share, lease queue.Lease, granted tokenbucket.Tokens) tokenbucket.Tokens {
	return t.terms.SetLeased(share, lease, granted)
}

// Contract puts the topic of a standalone broker under a contract. A topic that is already
// limited keeps its tokens, as far as they fit. Otherwise the bucket is initially empty:
// the topic may already have released a full bucket under the same contract, before a
// deletion or a restart. The contract survives a restart, but Config.Presets have priority.
// Error: ErrStorage.
func (t *Topic) Contract(c tokenbucket.Share, reject bool) error {
	contract := &metadata.Contract{RateMilli: int64(c.Rate), Burst: c.Burst, Reject: reject}
	return t.orders.ordered(func(m *metadata.Topic) bool {
		m.Contract = contract
		return true
	}, func(_ mono.Time, s *step) error {
		t.terms.contract = contract
		t.terms.agree(*contract, s)
		return nil
	})
}

// RemoveContract removes the contract and releases the messages that wait for tokens. After
// a restart there is no contract, except from Config.Presets. Error: ErrStorage.
func (t *Topic) RemoveContract() error {
	return t.orders.ordered(func(m *metadata.Topic) bool {
		m.Contract = nil
		return true
	}, func(now mono.Time, s *step) error {
		t.terms.contract = nil
		t.runner.mu.core.Unlimit(now, &s.fx)
		return nil
	})
}

// agree puts the topic under c. Requires: mu held.
func (t *terms) agree(c metadata.Contract, s *step) {
	t.runner.mu.core.Limit(t.overLimit(c.Reject))
	t.runner.mu.core.SetShare(t.runner.shared.now(), c.Share(), 0, &s.fx)
}

// restoreContract restores the recorded contract, unless the topic has a preset contract.
func (t *terms) restoreContract(c *metadata.Contract) {
	t.runner.do(func(_ mono.Time, s *step) {
		if !t.runner.mu.core.Contract().Limited() {
			t.contract = c
			t.agree(*c, s)
		}
	})
}
