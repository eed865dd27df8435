// Package greedy is publishers that send as much as they may: each has one message under
// way, and sends the next as soon as the broker that it belongs to lets it (pacing).
package greedy
