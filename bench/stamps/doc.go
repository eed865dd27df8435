//go:build linux

// Command stamps measures what arrival stamps are worth and what they cost, on
// this machine, against a sender whose clock is the same CLOCK_MONOTONIC.
//
//	go run ./bench/stamps error   # how far stamps are off, and what a rate limit makes of it
//	go run ./bench/stamps delay   # what nsqd makes of publishers that keep their contract
//	go run ./bench/stamps cpu     # processor time of a broker with each source
//
// error reads messages with one goroutine per connection, as nsqd does, while
// other goroutines keep the processors busy; each message carries when its
// write began, and the one behind it when that write had returned. The sender
// keeps a rate contract, so a rate limiter with the same contract should delay
// nothing. delay and cpu run nsqd itself.
//
// It sends open loop and prints quantiles of single messages, exactly. What error
// sends comes from a process of its own, delay and cpu are scenarios of tools/load.
// docs/arrival-stamps.md has results.
package main
