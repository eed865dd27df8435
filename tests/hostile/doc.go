// Package hostile holds nsqd to it that one client cannot hurt the others: it
// starts real processes and attacks them, while clients that do nothing wrong
// measure what they get. Their p99 under an attack is at most five times that of
// the quiet slices before and after it, of the same run; where a counter says
// more than a latency (bytes, descriptors, turns of an event loop), the counter
// is looked at instead or as well. The same attacks, all at once, run against an
// nsqd with the race detector.
//
// To keep another attack, add a row to attacks. SRTM_HOSTILE_NSQD=path attacks
// another nsqd instead.
package hostile
