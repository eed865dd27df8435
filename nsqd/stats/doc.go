// Package stats has the statistics of a broker that are not counters: end-to-end latencies, from
// a message's arrival to its FIN, over a sliding window, and the Go runtime's memory in the form
// of NSQ's /stats and statsd. The package reads no clock: times are arguments, from any single
// clock.
package stats
