//go:build linux

// Package peer compares brokers: ours, any that speaks NSQ's
// protocol, NATS, Redis streams and mosquitto, on the same work in one run.
//
//	go run ./bench peer --list
//	go run ./bench peer --scenarios=poisson-1000 --nsq=upstream=/path/to/nsqd --json=out.json
//
// With --loaddistributor our broker is measured in a cluster of two as well: with publishers at
// the broker of the topic, and at the other one, which forwards.
//
// Each round starts every broker anew, one after the other, and gives it the
// same work by the same schedule. Figures are medians of the rounds, and the least
// p99, of the round that was disturbed least. How the work is done and measured is
// tools/load's; late p99 says how late it sent, which no broker is to blame for but
// by taking the processor, load us/msg what the load itself cost, and others % what
// neither it nor the broker used of all processor time in the worst round: repeat
// what was disturbed.
package peer
