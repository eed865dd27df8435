package broker

import (
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsqd/metadata"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/tokenbucket"
)

// terms are what a topic promises: its contract and its SLO.
type terms struct {
	*runner // set once

	// Guarded by mu.
	slo      SLO
	contract *metadata.Contract // to be restored; not changed, but replaced. Nil: none, or the preset one
}

// Limit puts the topic under a contract without a share: it accepts, but
// releases nothing until a share comes. A topic that is limited keeps its share.
func (t *terms) Limit(slo SLO, reject bool) {
	t.do(func(mono.Time, *step) {
		t.slo = slo
		t.metrics.slo.Store(int64(slo.Latency))
		t.mu.core.Limit(t.overLimit(reject))
	})
}

func (t *terms) overLimit(reject bool) queue.OverLimit {
	return queue.OverLimit{Reject: reject, MaxDelay: t.shared.cfg.RejectAfter}
}

// SetLeased replaces the share for as long as the lease says, with granted tokens moved to
// it, and returns the tokens given up. The topic is limited from then on.
func (t *terms) SetLeased(share tokenbucket.Share, lease queue.Lease, granted tokenbucket.Tokens) (released tokenbucket.Tokens) {
	t.do(func(now mono.Time, s *step) {
		if !t.mu.core.Limited() {
			t.mu.core.Limit(t.overLimit(false))
		}
		released = t.mu.core.SetLeased(now, share, lease, granted, &s.fx)
	})
	return released
}

// Renew moves the ends of the share's lease, and reports whether it has a
// flexible part that has not lapsed.
func (t *terms) Renew(flexUntil, until mono.Time) (flex bool) {
	t.do(func(now mono.Time, s *step) {
		flex = t.mu.core.Limited() && t.mu.core.Renew(now, flexUntil, until, &s.fx)
	})
	return flex
}

// Contract puts the topic of a standalone broker under a contract. A topic that is
// limited already keeps the tokens it has, as far as they fit; any other begins with
// an empty bucket: what a full one would let go may have been let go before, by the
// same topic under the same contract before it was deleted or the broker restarted.
// After a restart the contract is the same, but for that of Config.Presets. Error: ErrStorage.
func (t *Topic) Contract(c tokenbucket.Share, reject bool) error {
	contract := &metadata.Contract{RateMilli: int64(c.Rate), Burst: c.Burst, Reject: reject}
	return t.ordered(func(m *metadata.Topic) bool {
		m.Contract = contract
		return true
	}, func(_ mono.Time, s *step) error {
		t.contract = contract
		t.agree(*contract, s)
		return nil
	})
}

// RemoveContract ends what Contract began; what waited for tokens is released. After a
// restart there is no contract, but for that of Config.Presets. Error: ErrStorage.
func (t *Topic) RemoveContract() error {
	return t.ordered(func(m *metadata.Topic) bool {
		m.Contract = nil
		return true
	}, func(now mono.Time, s *step) error {
		t.contract = nil
		t.mu.core.Unlimit(now, &s.fx)
		return nil
	})
}

// agree puts the topic under c. Requires: mu held.
func (t *terms) agree(c metadata.Contract, s *step) {
	t.mu.core.Limit(t.overLimit(c.Reject))
	t.mu.core.SetShare(t.shared.now(), c.Share(), 0, &s.fx)
}

// restoreContract is Contract of an earlier process. One that is preset stands.
func (t *terms) restoreContract(c *metadata.Contract) {
	t.do(func(_ mono.Time, s *step) {
		if !t.mu.core.Limited() {
			t.contract = c
			t.agree(*c, s)
		}
	})
}
