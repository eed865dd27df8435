// Package schedule says when emulated publishers send: as streams of events
// in order of time, the same for the same seed. It is pure: it knows no
// clock, no socket and no message; offsets count from the start of a run.
// tools/iotpub/trace makes streams of the same kind out of recorded events,
// and tools/iotpub/fleet sends what they say.
package schedule
