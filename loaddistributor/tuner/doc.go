// Package tuner decides, from what brokers measure, which placement a topic should have
// (SRTM paper, sections 4.2 and 6.5). It is pure and sees nothing but numbers; brokers,
// clocks and histograms are its caller's, loaddistributor/controller live and tools/sim
// in simulation.
//
// A Tuner (tuner.go) is shown the topics of a cluster, Propose, and told what their brokers
// record, Measure; it returns what is to be done. tools/sim has single searches only.
//
// A fit (fit.go) finds a new topic the placement that keeps its SLO. A Search is asked what
// to try next and told what was measured: slo.go is the statistic of a topic over several
// brokers, sequential.go the test that decides as early as it can with a stated error,
// search.go what a search asks and is told. There are two: paper.go searches over
// publishers in rounds of fixed length, as the paper does; fast.go searches over the
// number of brokers, by replay.go for what needs no traffic.
//
// Rebalancing moves publishers of a running topic away from a broker that is overloaded:
// a Watch per topic, in rebalance.go, says which ones, when and where to; evidence.go
// tells an overloaded broker from one whose bucket is too small.
//
// Both replay arrivals. trace.go makes one trace of what a topic's brokers have recorded
// of them. Brokers stamp arrivals by clocks of their own, so the trace is as true as those
// agree. Where they are apart by more than the bursts of a correlation group, the
// parts of a burst that went to different brokers lie apart too, and a forecast
// from them is too good. Nothing stands on a forecast: what it proposes is tested.
// What is not known is left out for all brokers alike, as a hole: a burst of which
// one broker's part is missing would look like a smaller one.
package tuner
