// Package calibrate measures capacity. Run finds the mcap of a running broker: the maximum rate
// that the broker carries within an SLO. Attempted judges whether this machine carried a load,
// and Smaller returns which load to try next.
//
// Run sends an open loop of Poisson publishers, at rates that tools/srtm/calibrate/search
// returns. One subscriber finishes every message. The topics are ephemeral, and gone afterwards.
//
// A rate is judged by the broker's own delivery latencies, from the arrival in the broker's
// kernel to the write to the subscriber. An SLO is about these latencies, and the
// loaddistributor judges a placement by them. Latencies from sender to receiver would count the
// slowness of this program as the broker's. The generator's own measurements say what it could
// not send in time.
//
// The package reaches a broker only through its protocol and its HTTP. The callers, tools/srtm and
// tools/srtm/up, decide what to do with the result.
package calibrate
