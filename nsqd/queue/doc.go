// Package queue is the message machine of one topic: messages wait for tokens,
// are fanned out to channels, and are in flight to consumers until they are
// finished, requeued or time out. It is pure: every step takes the time as an
// argument and answers with the deliveries it causes; nsqd/broker owns the
// lock, the clock and the sockets' side.
//
// A Topic and its channels are one machine with one owner, because a release
// touches all of them: the alternative, a lock per channel, needs two locks
// for every fan-out and lets a message be half released.
//
// It must not know connections or frames. Read nsqd/broker next.
package queue
