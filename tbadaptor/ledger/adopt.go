package ledger

import (
	"slices"

	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Adopt adds a contract that an earlier ledger may have granted, to the brokers in initial and to the
// brokers in awaited. No share grows until each of these brokers has reported its share or was
// forgotten. If the reported shares make up the contract, they stay; otherwise the brokers get initial.
// Adopt creates no tokens: buckets earn them.
//
// A known contract stays unchanged. Adopt fails with *Conflict if the topic has another contract, and
// with *Busy if brokers still hold shares of a removed contract.
func (l *Ledger) Adopt(name string, terms Terms, initial []share.Assigned, awaited []string) ([]Grant, error) {
	t, target, err := l.enter(name, terms, initial)
	switch {
	case err != nil:
		return nil, err
	case !t.contract.IsZero() && t.contract != terms.Contract:
		return nil, &Conflict{Topic: name, Current: t.contract, Requested: terms.Contract}
	case !t.contract.IsZero():
		return nil, nil
	}
	t.keepReported = true
	l.await(t, awaited)
	return l.replace(t, terms, target), nil
}

// Change gives a topic another contract with new shares. A broker that is not in target gets no share.
// Decreases go first: while a contract shrinks, the old contract holds until the brokers have
// acknowledged their decreases. A contract that grows gets no tokens; buckets earn them.
//
// If the ledger does not know the contract, or still awaits a broker, an earlier ledger granted the old
// shares. Until the awaited brokers have reported, shares grow only as far as terms.Former
// proves that there is room. Change fails with *Busy if brokers still hold shares of a removed
// contract.
func (l *Ledger) Change(name string, terms Terms, target []share.Assigned, awaited []string) ([]Grant, error) {
	t, sorted, err := l.enter(name, terms, target)
	switch {
	case err != nil:
		return nil, err
	case t.contract.IsZero() || len(t.awaited) > 0:
		l.await(t, awaited)
	case t.contract == terms.Contract && t.flex == terms.Flex && slices.Equal(t.initial, sorted):
		return nil, nil
	}
	t.keepReported = false
	return l.replace(t, terms, sorted), nil
}

// await makes a topic wait for the given brokers that have not reported.
func (l *Ledger) await(t *topic, brokers []string) {
	for _, id := range brokers {
		if i, found := slices.BinarySearch(t.awaited, id); !found && !l.reported[id] {
			t.awaited = slices.Insert(t.awaited, i, id)
			l.awaiting.add(id, t)
		}
	}
}

// bound computes unreported from total, the most that all brokers together used when the earlier ledger
// ended. Since then shares have only shrunk. A broker that has reported used at least its
// present share then, so the awaited brokers used, and use, at most the rest.
func (l *Ledger) bound(t *topic, total tokenbucket.Share) {
	for _, m := range t.members {
		if l.reported[m.broker] {
			total = total.Less(m.acked.share)
		}
	}
	t.noteUnreported(total)
}

// subtractUnreported subtracts the share that an awaited broker reports from unreported.
func (t *topic) subtractUnreported(held tokenbucket.Share) {
	if t.unreported != nil {
		t.noteUnreported(t.unreported.Less(held))
	}
}

// noteUnreported sets unreported. If brokers hold more than the former total, the total is wrong, and the
// share of the awaited brokers is unknown.
func (t *topic) noteUnreported(rest tokenbucket.Share) {
	if t.unreported = &rest; rest.Rate < 0 || rest.Burst < 0 {
		t.unreported = nil
	}
}

// markHeard records that a broker's shares are known, and resumes the topics that awaited the broker.
func (l *Ledger) markHeard(id string) (grants []Grant) {
	if l.reported[id] {
		return nil
	}
	l.reported[id] = true
	for _, t := range l.awaiting.topicsOf(id) {
		l.awaiting.remove(id, t)
		t.awaited = slices.DeleteFunc(t.awaited, func(awaited string) bool { return awaited == id })
		grants = append(grants, l.resume(t)...)
	}
	return grants
}

// resume starts granting an adopted contract once all its brokers have reported.
func (l *Ledger) resume(t *topic) []Grant {
	if len(t.awaited) > 0 || t.removing {
		return l.advance(t)
	}
	t.unreported = nil
	if kept := l.keptShares(t); t.keepReported && kept != nil {
		l.aim(t, kept)
	}
	return l.advance(t)
}

// keptShares returns the shares of the brokers of an adopted contract, so that tuned shares stay.
// If the shares do not sum to the contract, keptShares adds the rest in proportion: ended flexible
// parts, or a share in transit between brokers. It returns nil in any of these cases:
//   - a broker with a target holds nothing
//   - a broker without a target holds something
//   - the brokers together hold more than the contract
//   - a broker's reserved share differs from its acknowledged share
func (l *Ledger) keptShares(t *topic) []share.Assigned {
	rest := t.contract
	var kept []share.Load
	for _, m := range t.members {
		if m.target.IsZero() != m.acked.share.IsZero() || l.reserve(m) != m.acked.share {
			return nil
		}
		if m.target.IsZero() {
			continue
		}
		rest = rest.Less(m.acked.share)
		kept = append(kept, share.Load{Broker: m.broker, Share: m.acked.share})
	}
	if rest.Rate < 0 || rest.Burst < 0 {
		return nil
	}
	shares, err := share.Split(share.Static, t.contract, kept)
	if err != nil {
		return nil
	}
	return shares
}
