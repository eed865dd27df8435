// Package schedule decides when emulated publishers send. A schedule is a stream of events
// in time order, and the same seed gives the same stream. The package is pure: it uses no
// clock, no socket and no message. Offsets count from the start of a run.
// tools/iotpub/trace makes such streams from recorded events, and tools/iotpub/fleet sends
// them.
package schedule
