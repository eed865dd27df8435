//go:build linux

// Package stamps measures how far arrival stamps are off on this machine, and what a
// rate limit makes of it, against a sender whose clock is the same CLOCK_MONOTONIC:
//
//	go run ./bench stamps --conns=1000 --rate=10000 --busy=8
//
// It reads messages with one goroutine per connection, as nsqd does, while other
// goroutines keep the processors busy; each message carries when its write began, and
// the one behind it when that write had returned. The sender is a process of its own,
// sends open loop and keeps a rate contract, so a rate limiter with the same contract
// should delay nothing. Quantiles are of single messages, exactly.
//
// What stamps cost, and what nsqd itself makes of such a stream, are scenarios of
// bench/peer (--sources). docs/arrival-stamps.md has results.
package stamps
