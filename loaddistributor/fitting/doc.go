// Package fitting decides from measured counts whether a topic keeps its SLO.
// It is pure and sees nothing but numbers: no brokers, no clock, no histograms
// (those are merged in loaddistributor/controller, which also keeps the
// sliding window that the counts cover).
package fitting
