package ledger

import (
	"slices"

	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Adopt puts a contract under the ledger's care of which an earlier ledger may have
// granted parts, to the brokers named in initial and to others. No share grows
// before each of them has said what it holds, or was forgotten. Then what the
// brokers hold stays as it is, as far as it makes up the contract; where it does
// not, they get initial. Tokens are only earned.
//
// A contract that the ledger knows is left as it is. It fails with *Conflict if
// the topic has another one, with *Busy if brokers still hold shares of one that
// was removed.
func (l *Ledger) Adopt(name string, terms Terms, initial []share.Assigned, others []string) ([]Grant, error) {
	t, target, err := l.enter(name, terms, initial)
	switch {
	case err != nil:
		return nil, err
	case !t.contract.IsZero() && t.contract != terms.Contract:
		return nil, &Conflict{Topic: name, Have: t.contract, Got: terms.Contract}
	case !t.contract.IsZero():
		return nil, nil
	}
	t.keep = true
	l.await(t, others)
	return l.replace(t, terms, target), nil
}

// Change gives a topic another contract, and the shares that go with it; a broker
// that is not named is meant to have none. Decreases go first, so while a contract
// shrinks the old one holds until its brokers have acknowledged theirs; one that
// grows comes without tokens, which are only earned. A contract that the ledger does
// not know, or that awaits a broker still, is one that an earlier ledger granted. Until these
// brokers and others were heard, shares grow only as far as terms.Former proves that there is
// room. Change fails with *Busy if brokers still hold shares of a removed contract.
func (l *Ledger) Change(name string, terms Terms, target []share.Assigned, others []string) ([]Grant, error) {
	t, sorted, err := l.enter(name, terms, target)
	switch {
	case err != nil:
		return nil, err
	case t.contract.IsZero() || len(t.awaited) > 0:
		l.await(t, others)
	case t.contract == terms.Contract && t.flex == terms.Flex && slices.Equal(t.initial, sorted):
		return nil, nil
	}
	t.keep = false
	return l.replace(t, terms, sorted), nil
}

// replace puts other terms in force. Requires: checked; target sorted.
func (l *Ledger) replace(t *topic, terms Terms, target []share.Assigned) []Grant {
	adopted := t.contract.IsZero() || len(t.awaited) > 0
	t.contract, t.flex, t.initial = terms.Contract, terms.Flex, target
	if adopted && t.unheard == nil && !terms.Former.IsZero() {
		l.bound(t, terms.Former)
	}
	l.aim(t, target)
	if !adopted {
		return l.advance(t)
	}
	for _, a := range target {
		l.await(t, []string{a.Broker})
	}
	return l.resume(t)
}

// await has a topic wait for those of the brokers that were not heard.
func (l *Ledger) await(t *topic, brokers []string) {
	for _, id := range brokers {
		if i, there := slices.BinarySearch(t.awaited, id); !there && !l.heard[id] {
			t.awaited = slices.Insert(t.awaited, i, id)
			l.awaiting.add(id, t)
		}
	}
}

// bound notes that all brokers together used at most total when the earlier ledger ended. Since
// then shares have only shrunk: a broker that was heard used at least what it holds now, and the
// awaited brokers used, and use, at most the rest.
func (l *Ledger) bound(t *topic, total tokenbucket.Share) {
	for _, m := range t.members {
		if l.heard[m.broker] {
			total = total.Less(m.acked.share)
		}
	}
	t.noteUnheard(total)
}

// found notes the share that an awaited broker holds.
func (t *topic) found(held tokenbucket.Share) {
	if t.unheard != nil {
		t.noteUnheard(t.unheard.Less(held))
	}
}

// noteUnheard sets unheard. If brokers hold more than the former total, the total is wrong, and
// nothing is known of the awaited brokers.
func (t *topic) noteUnheard(rest tokenbucket.Share) {
	if t.unheard = &rest; rest.Rate < 0 || rest.Burst < 0 {
		t.unheard = nil
	}
}

// hear notes that it is known what a broker holds, and resumes what waited for it.
func (l *Ledger) hear(id string) (grants []Grant) {
	if l.heard[id] {
		return nil
	}
	l.heard[id] = true
	for _, t := range l.awaiting.of(id) {
		l.awaiting.remove(id, t)
		t.awaited = slices.DeleteFunc(t.awaited, func(awaited string) bool { return awaited == id })
		grants = append(grants, l.resume(t)...)
	}
	return grants
}

// resume begins to grant an adopted contract once all its brokers were heard.
func (l *Ledger) resume(t *topic) []Grant {
	if len(t.awaited) > 0 || t.removing {
		return l.advance(t)
	}
	t.unheard = nil
	if held := l.kept(t); t.keep && held != nil {
		l.aim(t, held)
	}
	return l.advance(t)
}

// kept returns what the brokers of an adopted contract hold, and what is missing to
// the contract in proportion to it: flexible parts that have ended, or a share that
// was on its way from one to another. So what was tuned stays as it is. nil: a
// broker that is meant to have a share holds nothing, another one holds something,
// or all hold more than the contract.
func (l *Ledger) kept(t *topic) []share.Assigned {
	left := t.contract
	var held []share.Load
	for _, m := range t.members {
		if m.target.IsZero() != m.acked.share.IsZero() || l.reserve(m) != m.acked.share {
			return nil
		}
		if m.target.IsZero() {
			continue
		}
		left = left.Less(m.acked.share)
		held = append(held, share.Load{Broker: m.broker, Share: m.acked.share})
	}
	if left.Rate < 0 || left.Burst < 0 {
		return nil
	}
	shares, err := share.Split(share.Static, t.contract, held)
	if err != nil {
		return nil
	}
	return shares
}
