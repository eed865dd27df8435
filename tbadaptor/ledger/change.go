package ledger

import (
	"fmt"

	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Change gives a topic another contract, and the shares that go with it; a
// broker that is not named is meant to have none. Decreases go first, so while
// a contract shrinks the old one holds until its brokers have acknowledged
// theirs; one that grows comes without tokens, which are only earned. A topic
// without a contract gets it as from SetContract. It fails with *Busy if brokers
// still hold shares of a removed one.
func (l *Ledger) Change(name string, contract tokenbucket.Share, target []share.Assigned) ([]Grant, error) {
	t := l.topics[name]
	if t == nil || t.removing || t.contract.IsZero() || t.contract == contract {
		return l.SetContract(name, contract, target)
	}
	if err := contract.Validate(); err != nil {
		return nil, fmt.Errorf("contract of topic %q: %w", name, err)
	}
	if contract.IsZero() {
		return nil, fmt.Errorf("contract of topic %q is empty", name)
	}
	sorted, err := checkTarget(contract, target)
	if err != nil {
		return nil, fmt.Errorf("topic %q: %w", name, err)
	}
	t.contract, t.initial = contract, sorted
	t.aim(sorted)
	return l.advance(t), nil
}
