package catalog

import (
	"fmt"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// hundred returns a catalog of 100 brokers and a topic that needs all brokers, with 10,000 publishers
// in 100 correlation groups.
func hundred(b *testing.B) (*Catalog, *Spec) {
	c := New()
	for i := range 100 {
		testkit.Result(c.Apply(joined(fmt.Sprintf("b%02d", i), 1000+int64(i)))).Must(b)
	}
	s := spec("t", 0, 100_000)
	for i := range 100 {
		s.Demand.Groups = append(s.Demand.Groups, placement.Group{Key: fmt.Sprintf("g%d", i), Count: 100, Rate: 10})
	}
	return c, s
}

// The budget is 50 ms for the decision plus the commit.
func BenchmarkPlaceAndCommit(b *testing.B) {
	c, s := hundred(b)
	for b.Loop() {
		plan := testkit.Result(placement.Place(s.Policy, c.Snapshot(""), s.Demand, nil)).Must(b)
		e := testkit.Result(NewTopicPlaced(s, plan, "")).Must(b)
		testkit.Result(c.Apply(e)).Must(b)
		testkit.Result(c.Apply(TopicRemoved{Topic: "t"})).Must(b)
	}
}

// The budget is 1 ms, the call over gRPC included.
func BenchmarkResolve(b *testing.B) {
	c, s := hundred(b)
	plan := testkit.Result(placement.Place(s.Policy, c.Snapshot(""), s.Demand, nil)).Must(b)
	placed := testkit.Result(NewTopicPlaced(s, plan, "")).Must(b)
	events := []Event{placed}
	for _, q := range plan.Quotas {
		events = append(events, MemberPrepared{"t", q.Broker})
	}
	for _, e := range append(events, TopicActivated{"t"}) {
		testkit.Result(c.Apply(e)).Must(b)
	}
	for b.Loop() {
		testkit.Result(c.Resolve("t", "g42.57")).Must(b)
	}
}
