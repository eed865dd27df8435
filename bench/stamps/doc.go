//go:build linux

// Package stamps measures the errors of arrival stamps on this machine, and their effect on
// a rate limiter. The sender uses the same CLOCK_MONOTONIC:
//
//	go run ./bench stamps --conns=1000 --rate=10000 --busy=8
//
// The receiver reads with one goroutine per connection, like nsqd, while other goroutines
// keep the processors busy. Each message carries the time when its write began, and the
// time when the connection's previous write returned. The sender is a separate process,
// sends open loop and keeps a rate contract, so a rate limiter with the same contract
// should delay nothing. Quantiles are exact quantiles of single messages.
//
// Scenarios of bench/peer (--sources) measure the cost of stamps, and nsqd's handling of
// such a stream. docs/arrival-stamps.md has results.
package stamps
