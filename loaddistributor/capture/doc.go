// Package capture makes one trace of what a topic's brokers have recorded of its
// arrivals, for loaddistributor/fitting to replay. It is pure: pieces of the
// records and the time at which they came are arguments, and it knows no session
// and no message of the wire.
//
// Brokers stamp arrivals by clocks of their own, so the trace is as true as those
// agree. Where they are apart by more than the bursts of a correlation group, the
// parts of a burst that went to different brokers lie apart too, and a forecast
// from them is too good. Nothing stands on a forecast: what it proposes is tested.
//
// What is not known is left out for all brokers alike, as a hole: a burst of which
// one broker's part is missing would look like a smaller one.
package capture
