// Package calibrate measures what a running broker carries within an SLO, its mcap:
// it sends it an open loop of Poisson publishers at rates that tools/srtm/calibrate/search
// asks for, with one subscriber that finishes every message, on ephemeral topics
// that are gone afterwards.
//
// A rate is judged by the broker's own delivery latencies, from the arrival in its
// kernel to the write to the subscriber: that is what an SLO is about, and what the
// loaddistributor judges a placement by. Latencies from sender to receiver would
// count this program's slowness as the broker's. What the generator itself could not
// send in time is known from its own measurements.
//
// It knows a broker by its protocol and its HTTP alone, and neither who asks nor
// what becomes of the result: tools/srtm does.
package calibrate
