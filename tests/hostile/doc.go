// Package hostile checks that one client of nsqd cannot hurt the others. It starts real processes and
// attacks them, while well-behaved clients measure their latency. The clients' p99 under an attack is
// at most five times the p99 of the quiet slices before and after it, in the same run. If a counter
// (bytes, descriptors, turns of an event loop) shows more than a latency, the test checks the counter
// instead or as well. The same attacks, all at once, run against an nsqd with the race detector.
//
// To keep another attack, add a row to attacks. SRTM_HOSTILE_NSQD=path attacks another nsqd instead.
package hostile
