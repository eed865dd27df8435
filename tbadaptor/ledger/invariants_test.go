package ledger

import (
	"fmt"
	"maps"
	"slices"

	"github.com/srtm-io/srtm/tokenbucket"
)

// checkInvariants returns the first invariant that l breaks, including (1) to (3) of the package
// comment. Tests call it after every step.
func (l *Ledger) checkInvariants() error {
	for _, name := range slices.Sorted(maps.Keys(l.topics)) {
		t := l.topics[name]
		free := t.contract
		for _, m := range t.members {
			r := l.reserve(m)
			free.Rate -= r.Rate
			free.Burst -= r.Burst
		}
		if !t.contract.IsZero() && (free.Rate < 0 || free.Burst < 0) {
			return fmt.Errorf("topic %q: reserved is %+v less than the contract %+v", name, free, t.contract)
		}
	}
	return l.checkForm()
}

// checkForm checks the invariants that hold even if brokers reported more than the contract, after the
// ledger lost its memory.
func (l *Ledger) checkForm() error {
	members, awaited := 0, 0
	for _, name := range slices.Sorted(maps.Keys(l.topics)) {
		t := l.topics[name]
		if t.name != name {
			return fmt.Errorf("topic %q is kept as %q", t.name, name)
		}
		if !slices.IsSortedFunc(t.members, func(a, b *member) int {
			if a.broker < b.broker {
				return -1
			}
			return 1 // equal ids are out of order, too
		}) {
			return fmt.Errorf("topic %q: members out of order", name)
		}
		var target tokenbucket.Share
		for _, m := range t.members {
			target.Rate += m.target.Rate
			target.Burst += m.target.Burst
			members++
			if l.memberships[m.broker][name] != t {
				return fmt.Errorf("topic %q, broker %q: not among its memberships", name, m.broker)
			}
			err := l.checkMember(t, m)
			if err == nil {
				err = l.checkDecrease(t, m)
			}
			if err != nil {
				return fmt.Errorf("topic %q, broker %q: %w", name, m.broker, err)
			}
		}
		awaited += len(t.awaited)
		for _, id := range t.awaited {
			if l.awaiting[id][name] != t || l.reported[id] {
				return fmt.Errorf("topic %q, broker %q: not among those that await it, or has reported", name, id)
			}
		}
		if target.Rate > t.contract.Rate || target.Burst > t.contract.Burst {
			return fmt.Errorf("topic %q: targets sum to %+v of %+v", name, target, t.contract)
		}
		if limit := tokenbucket.Tokens(l.free(t).Burst) * tokenbucket.Token; t.pool < 0 || t.pool > limit {
			return fmt.Errorf("topic %q: %d thousandths of a token in the pool, outside 0 to %d", name, t.pool, limit)
		}
	}
	// order: only counts
	for id, topics := range l.memberships {
		members -= len(topics)
		if len(topics) == 0 {
			return fmt.Errorf("broker %q: an empty set of memberships", id)
		}
	}
	// order: only counts
	for _, topics := range l.awaiting {
		awaited -= len(topics)
	}
	if members != 0 || awaited != 0 {
		return fmt.Errorf("%d memberships are of no member, %d topics await no broker", -members, -awaited)
	}
	return nil
}

// checkDecrease returns an error if m could have been granted a smaller share and was not. Unknown
// shares of other brokers never delay a decrease.
func (l *Ledger) checkDecrease(t *topic, m *member) error {
	kept := t.keepReported && len(t.awaited) > 0 && !l.exceeded(t)
	if t.contract.IsZero() && !t.removing || kept && !t.removing || !l.Connected(m.broker) || l.brokers[m.broker].leaseEnded || m.pending.Epoch != 0 {
		return nil
	}
	if smaller(m.acked.share, m.target) != m.acked.share {
		return fmt.Errorf("holds %+v, its target is %+v, and no grant is on the way; awaited: %v", m.acked.share, m.target, t.awaited)
	}
	return nil
}

func (l *Ledger) checkMember(t *topic, m *member) error {
	p := m.pending
	switch {
	case m.acked.share.Validate() != nil || m.acked.base.Validate() != nil || p.Share.Validate() != nil || p.Base().Validate() != nil || m.target.Validate() != nil:
		return fmt.Errorf("an invalid share: target %+v, acknowledged %+v, granted %+v", m.target, m.acked, p.Share)
	case smaller(m.acked.share, m.acked.base) != m.acked.base || smaller(p.Share, p.Base()) != p.Base():
		return fmt.Errorf("a base above its share: acknowledged %+v, granted %+v", m.acked, p)
	case max(m.ackedEpoch, p.Epoch) > l.epoch:
		return fmt.Errorf("epoch %d is above the ledger's %d", max(m.ackedEpoch, p.Epoch), l.epoch)
	case p.Epoch == 0 && p != Grant{}:
		return fmt.Errorf("a grant without an epoch: %+v", p)
	case p.Epoch != 0 && p.Epoch <= m.ackedEpoch:
		return fmt.Errorf("epoch %d granted after %d was acknowledged", p.Epoch, m.ackedEpoch)
	case p.Epoch != 0 && (p.Broker != m.broker || p.Topic != t.name):
		return fmt.Errorf("holds a grant of broker %q, topic %q", p.Broker, p.Topic)
	case p.Tokens < 0 || p.Tokens > tokenbucket.Tokens(max(0, p.Share.Burst-m.acked.share.Burst))*tokenbucket.Token:
		return fmt.Errorf("%d thousandths of a token come with a burst that grows from %d to %d", p.Tokens, m.acked.share.Burst, p.Share.Burst)
	}
	return nil
}
