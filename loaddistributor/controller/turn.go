package controller

import (
	"strings"

	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// A share has one token at least, and a contract has b. While a topic moves from k
// brokers to others it is on more than k, so that one with b = k has no token for
// each. Then they take turns, and the contract holds throughout: brokers that the
// topic moved away from keep theirs, with the rate of those that have none yet, until
// nothing comes there and nothing waits for a token; the brokers that it moved to hold
// what they accept until then, which takes as long as publishers take to follow and
// the reports to say so. If something comes to the former all the same, over HTTP say,
// it is their turn again.
//
// The design that lost refused such a move: a broker with such a topic could not be
// drained, nor the topic leave one that is overloaded.

// scarce reports whether there are fewer tokens than brokers that may want one.
func scarce(plan placement.Plan, retiring []string) bool {
	return usedOf(plan).Burst < int64(len(plan.Quotas)+len(retiring))
}

// unspent returns the brokers that need tokens, as far as their last report tells: messages
// came, or wait for one. A connection that is only there needs none, nor does a broker that
// is away: what it may be using is reserved in the ledger, whatever is asked for.
func (st *state) unspent(name string, ids []string) []string {
	var need []string
	for _, id := range ids {
		f := st.reports(name, id)
		if f == nil {
			continue
		}
		if r := f.newest().stats; r.Offered > 0 || r.Backlog > 0 {
			need = append(need, id)
		}
	}
	return need
}

// takesTurns reports whether other brokers have their turn now than those that the adaptor
// was told of.
func (st *state) takesTurns(topic catalog.Topic) bool {
	name := topic.Spec.Name()
	if !scarce(topic.Plan, topic.Retiring) {
		st.topics.at(name).turns = nil
		return false
	}
	told := st.topics.see(name).turns
	return told == nil || *told != strings.Join(st.unspent(name, topic.Retiring), " ")
}
