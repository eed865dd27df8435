// Package trace reads recorded events and replays them as a schedule. A replay can be
// faster by a factor, and can superpose several rotated copies. A Trace is an immutable
// recording. A Replay is a stream of tools/iotpub/schedule, and the same seed gives the
// same stream. The package sends nothing.
//
// A trace is CSV, plain or gzip, sorted by time, with the header
//
//	offset_seconds,publisher_id,correlation_key,payload_bytes
package trace
