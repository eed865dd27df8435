// Package fair computes what publishers that share a capacity may send now, in proportion to their
// weights. It only uses sums over their messages, as in the Improved EFXCP paper (whose own rule is
// in tools/sim/link). The package knows neither publishers nor connections, has no clock, and sends
// nothing. Its owner calls Message for each message and Interval at the end of each interval.
// pacing/sender implements a publisher's reaction to the advice.
package fair
