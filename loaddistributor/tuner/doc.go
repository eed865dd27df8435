// Package tuner derives from brokers' measurements which placement a topic should have
// (SRTM paper, sections 4.2 and 6.5). The package is pure and sees only numbers. Its
// callers own brokers, clocks and histograms: loaddistributor/controller live, and
// tools/sim in simulation.
//
// A Tuner (tuner.go) receives the topics of a cluster (Propose) and the records of their
// brokers (Measure), and returns effects. tools/sim runs only single searches.
//
// A fit (fit.go) finds the placement of a new topic that meets the topic's SLO. A Search
// (search.go) returns the next action and receives the measurements. slo.go is the
// statistic of a topic over several brokers. sequential.go is the test that decides as
// early as possible with a stated error. There are two searches. paper.go searches over
// publishers in rounds of fixed length, as the paper does. fast.go searches over the
// number of brokers, and uses replay.go to avoid traffic where it can.
//
// Rebalancing moves publishers of a running topic away from an overloaded broker. A Watch
// per topic (rebalance.go) decides which publishers move, when and where. evidence.go
// distinguishes an overloaded broker from a broker whose bucket is too small.
//
// Both replay arrivals. trace.go merges the arrivals recorded by a topic's brokers into
// one trace. Brokers stamp arrivals by their own clocks, so the trace is only as accurate
// as the clocks agree. If clocks differ by more than the bursts of a correlation group,
// the parts of a burst on different brokers lie apart, and a forecast is too good. This
// is safe, because a test follows each forecast. Gaps in the record of one broker become
// holes for all brokers: a burst without one broker's part would look like a smaller
// burst.
package tuner
