// Package fitting finds a placement that keeps a topic's SLO, by measurement
// (SRTM paper, sections 4.2 and 6.5). It is pure and sees nothing but numbers: a
// Search is asked what to try next and told what was measured; brokers, clocks and
// histograms are its caller's, loaddistributor/controller live and tools/drlsim
// in simulation.
//
// slo.go is the statistic of a topic over several brokers, sequential.go the test
// that decides as early as it can with a stated error, search.go what a search asks and is told. There are two: paper.go searches over
// publishers in rounds of fixed length, as the paper does; fast.go searches over the
// number of brokers, by replay.go for what needs no traffic.
package fitting
