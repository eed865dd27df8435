// Package payload encodes the body of an emulated message. From the body the receiver
// computes the latency, and checks that the message arrives exactly once. The package is
// pure. Intended is read from internal/clock, so sender and receiver must share a host.
package payload
