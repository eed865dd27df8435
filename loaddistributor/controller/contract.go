package controller

import (
	"slices"
	"strings"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/shareproto"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tokenbucket"
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

// contractRequest is what the adaptor is told of a topic's contract; whose turn it is, is
// noted. Brokers that retire get a little, to release what they have. What a plan leaves
// unused, for publishers without a place, is no part of the contract meanwhile: the adaptor
// would give it to the others.
func (st *state) contractRequest(spec *catalog.Spec, plan placement.Plan, retiring []string) (*srtmv1.SetContractRequest, error) {
	waiting := retiring
	if scarce(plan, retiring) {
		retiring = st.unspent(spec.Name(), retiring)
		told := strings.Join(retiring, " ")
		st.topics.at(spec.Name()).turns = &told
	}
	waiting = slices.DeleteFunc(slices.Clone(waiting), func(id string) bool { return slices.Contains(retiring, id) })
	shares, rest, err := placement.WithRetiring(plan, len(retiring))
	if err != nil {
		return nil, err
	}
	contract := ContractProto(spec)
	used := usedOf(plan)
	contract.RateMilli, contract.Burst = int64(used.Rate), used.Burst
	req := &srtmv1.SetContractRequest{Topic: spec.Name(), Contract: contract, ShareRule: spec.ShareRule}
	for i, q := range plan.Quotas {
		if shares[i].IsZero() {
			waiting = append(waiting, q.Broker)
			continue
		}
		req.Members = append(req.Members, &srtmv1.Member{
			BrokerId: q.Broker, Share: shareproto.To(shares[i]), Publishers: uint32(len(q.Publishers)),
		})
	}
	for i, id := range retiring {
		if rest[i].IsZero() {
			waiting = append(waiting, id)
			continue
		}
		req.Members = append(req.Members, &srtmv1.Member{BrokerId: id, Share: shareproto.To(rest[i]), Retiring: true})
	}
	req.Awaited = waiting
	ids := slices.Clone(waiting)
	for _, m := range req.Members {
		ids = append(ids, m.BrokerId)
	}
	for _, id := range ids {
		if b, _ := st.next.Broker(id); b.Strict {
			req.Strict = append(req.Strict, id)
		}
	}
	return req, nil
}

// usedOf is the part of the contract that a plan divides: all of it, but for the
// part of publishers without a place.
func usedOf(plan placement.Plan) (sum tokenbucket.Share) {
	for _, q := range plan.Quotas {
		sum.Rate += q.Share.Rate
		sum.Burst += q.Share.Burst
	}
	return sum
}

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
		t := st.reported(id).Topic(name)
		if t == nil {
			continue
		}
		if r := t.Newest().Stats; r.Offered > 0 || r.Backlog > 0 {
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
