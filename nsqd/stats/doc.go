// Package stats has the numbers of a broker that are not counts: end-to-end latencies,
// from a message's arrival to its FIN, over a window of time that moves on, and the Go
// runtime's memory as NSQ shows it in /stats and sends it to statsd. It reads no clock:
// times are arguments, of any one clock.
package stats
