// Package sender is what the one who is paced does: Bucket keeps a publisher to
// the rate and burst that a broker advised. It has no clock and waits for nothing;
// its owner does, in the client library and in the simulator. Where advice comes
// from is pacing/fair's.
package sender
