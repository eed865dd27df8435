package ledger

import (
	"slices"

	"github.com/srtm-io/srtm/tbadaptor/share"
)

// Adopt puts a contract under the ledger's care of which an earlier ledger may have
// granted parts, to the brokers named in initial and to others. Nothing is granted
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
// not know, or that awaits a broker still, is one that an earlier ledger granted: as
// with Adopt, nothing is granted before these brokers and others were heard. It fails
// with *Busy if brokers still hold shares of a removed one.
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
