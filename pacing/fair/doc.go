// Package fair computes what publishers who share a capacity may send now, in
// proportion to their weights, from sums over their messages alone, as the Improved
// EFXCP paper does (its own rule is tools/sim/link's). It knows neither
// publishers nor connections, has no clock, and sends nothing; its owner calls
// Message for each message and Interval at the end of each interval. What
// a publisher does with the advice is pacing/sender's.
package fair
