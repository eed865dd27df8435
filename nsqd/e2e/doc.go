// Package e2e keeps end-to-end latencies, from a message's arrival to its FIN,
// over a window of time that moves on. It reads no clock: times are arguments,
// of any one clock.
package e2e
