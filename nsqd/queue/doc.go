// Package queue is the state machine of one topic. Messages wait for tokens, fan out to the
// channels, and are in flight to consumers until they are finished, requeued or time out. The
// package is pure: every step takes the time as an argument and returns the deliveries that the
// step causes. Package nsqd/broker owns the lock, the clock and the sockets.
//
// A Topic and its channels are one machine with one owner, because a release touches all of them.
// The alternative, a lock per channel, needs two locks for every fan-out and permits a
// half-released message.
//
// A late message waited for its token (Message.Access), for consumers, or for the broker. A
// message waits for consumers
//   - in the topic, while the topic is paused, has no channel, or has a full channel
//     (Message.Held);
//   - in a channel, while the channel is paused, has no consumer, or each consumer holds as many
//     messages as its RDY (Delivery.Waited). If a consumer did not take a delivery, the message
//     waited for that consumer. A message on disk behind such messages waits for consumers too.
//
// All other waiting is the broker's, and so is the time before the topic or channel existed (a
// restart of the broker). Credit from a FIN counts from when the broker reads the FIN. Both waits
// are computed from the instant at which the topic or channel was last open, so they cost one
// assignment if nothing waits.
//
// A message's way from PUB to FIN is Topic.Put, Topic.release and Channel. A contract decides
// when the message gets its token. A Channel has items (the messages in memory) and consumers.
// The other parts handle messages beyond memory: log, tail and readCache, which do not know their
// readers; backlog, the topic's own cursor; cursor, a channel's cursor; and cursors, which
// combines the log, the backlog and the channels. The topic and the channels refer to their
// parts, and a cursor refers to the backlog and the log. No part refers back.
//
// The package must not know connections or frames. Read nsqd/broker next.
package queue
