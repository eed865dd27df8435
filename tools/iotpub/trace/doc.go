// Package trace reads recorded events and replays them as a schedule: faster
// by a factor, and several times over as rotated copies. Reading is apart from
// replaying: a Trace is immutable, and a Replay is a stream like any other of
// tools/iotpub/schedule, the same for the same seed. It sends nothing.
//
// A trace is CSV, plain or gzip, sorted by time, with the header
//
//	offset_seconds,publisher_id,correlation_key,payload_bytes
package trace
