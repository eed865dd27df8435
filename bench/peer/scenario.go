//go:build linux

package main

import "time"

// scenario is one kind of work. It does not change.
type scenario struct {
	name, what string

	conns    int     // publishers
	rate     float64 // messages per second of all, open loop; 0: as fast as they go in
	together int     // messages that a publisher sends at one instant
	batch    bool    // in one command, where the protocol has one
	size     int     // bytes of a message, at least timeSize
	channels int     // each gets every message; 0: 1
	limit    int     // messages, at most

	slow   bool // one channel more, that takes 100 messages per second
	late   bool // nobody subscribes until all is sent
	memory int  // messages that a queue may hold in memory; 0: all
	fsync  bool // what is accepted is on stable storage
	tls    bool

	nsqOnly bool // the others have nothing that compares
}

// timeSize is how much of a message is taken by the instant at which it was due.
const timeSize = 8

// scenarios are the work of issue and documents: docs/performance.md has them
// in this order.
func scenarios() []scenario {
	poisson := func(name string, conns int) scenario {
		return scenario{name: name, what: "publishers at 10 msg/s each, at random (Poisson)", conns: conns, rate: 10 * float64(conns), size: 100}
	}
	body := func(name string, size int, rate float64) scenario {
		return scenario{name: name, what: "as poisson-100, larger messages", conns: 100, rate: rate, size: size}
	}
	all := []scenario{
		poisson("poisson-100", 100), poisson("poisson-1000", 1000), poisson("poisson-2000", 2000), poisson("poisson-4000", 4000),
		{name: "bursts", what: "1000 publishers, each 10 messages at once, 10,000 msg/s in all", conns: 1000, rate: 10_000, together: 10, size: 100},
		{name: "pipelined", what: "10 publishers, one message per command, as fast as they go in", conns: 10, size: 100, together: 50, limit: 1_000_000},
		{name: "mpub", what: "4 publishers, 200 messages per command, as fast as they go in", conns: 4, size: 100, together: 200, batch: true, limit: 2_000_000},
		body("body-1k", 1<<10, 5000), body("body-16k", 16<<10, 2000), body("body-64k", 64<<10, 500),
		{name: "channels-4", what: "as poisson-1000 at 5 msg/s each, 4 channels", conns: 1000, rate: 5000, size: 100, channels: 4},
		{name: "channels-16", what: "as poisson-1000 at 2 msg/s each, 16 channels", conns: 1000, rate: 2000, size: 100, channels: 16},
		{name: "slow", what: "as poisson-1000, and a channel that takes 100 msg/s", conns: 1000, rate: 10_000, size: 100, slow: true},
		{name: "idle", what: "10,000 connections, 1,000 msg/s in all", conns: 10_000, rate: 1000, size: 100},
		{name: "overflow", what: "200 messages per command to disk, read when all are there", conns: 4, size: 100, together: 200, batch: true, limit: 500_000, late: true, memory: 100, nsqOnly: true},
		{name: "fsync", what: "100 publishers, 1,000 msg/s in all, each on stable storage before it is accepted; upstream syncs each, too, but answers before it does", conns: 100, rate: 1000, size: 100, fsync: true, nsqOnly: true},
		{name: "tls", what: "as poisson-100, encrypted", conns: 100, rate: 1000, size: 100, tls: true, nsqOnly: true},
	}
	for i := range all {
		all[i].together = max(all[i].together, 1)
		all[i].channels = max(all[i].channels, 1)
	}
	return all
}

// The bounds of a run.
const (
	warming  = time.Second      // before what is measured, open loop
	longest  = 5 * time.Second  // of sending as fast as it goes in
	patience = 20 * time.Second // for answers and deliveries after the last message was sent
)
