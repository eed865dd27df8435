// Package greedy emulates publishers that send as much as their broker allows. Each
// publisher has one message in flight, and sends the next message as soon as the broker's
// pacing permits.
package greedy
