package ledger

import (
	"fmt"

	"github.com/srtm-io/srtm/tbadaptor/share"
)

// Change gives a topic another contract, and the shares that go with it; a
// broker that is not named is meant to have none. Decreases go first, so while
// a contract shrinks the old one holds until its brokers have acknowledged
// theirs; one that grows comes without tokens, which are only earned. A topic
// without a contract gets it as from SetContract. It fails with *Busy if brokers
// still hold shares of a removed one.
func (l *Ledger) Change(name string, terms Terms, target []share.Assigned) ([]Grant, error) {
	contract, t := terms.Contract, l.topics[name]
	if t == nil || t.removing || t.contract.IsZero() || t.contract == contract {
		return l.SetContract(name, terms, target)
	}
	if err := contract.Validate(); err != nil {
		return nil, fmt.Errorf("contract of topic %q: %w", name, err)
	}
	if contract.IsZero() {
		return nil, fmt.Errorf("contract of topic %q is empty", name)
	}
	if terms.Flex < 0 || terms.Flex > 1000 {
		return nil, fmt.Errorf("%d thousandths of the shares of topic %q are to be flexible: want 0 to 1000", terms.Flex, name)
	}
	sorted, err := checkTarget(contract, target)
	if err != nil {
		return nil, fmt.Errorf("topic %q: %w", name, err)
	}
	t.contract, t.flex, t.initial = contract, terms.Flex, sorted
	l.aim(t, sorted)
	return l.advance(t), nil
}
