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
// Why a message was late has three answers: it waited for its token
// (Message.Access), for consumers, or for the broker, whose is all the rest.
// It waits for consumers
//   - in the topic, while that is paused, has no channel, or has one that is full
//     (Message.Held);
//   - in a channel, from when it could be handed over until a consumer has credit:
//     while the channel is paused, has no consumer, or each holds as many as its RDY
//     (Delivery.Waited). From then on the broker is late, except that what waits
//     behind such messages on the disk waits for consumers too. What was handed
//     over to a consumer that did not take it waited for that one.
//
// Both are cut at the instant from which the backlog was last open, so they cost an
// assignment where nothing waits. What was before the topic's or channel's life (a
// restart of the broker) is the broker's. Credit that a FIN gives counts from when
// the broker reads it.
//
// A message's way from PUB to FIN is Topic.Put and release, contract, which says when it has
// its token, and Channel, which has items, the messages in memory, and consumers. Each of the
// rest is for what is beyond memory: log, tail and readCache, of which nothing knows who reads;
// backlog, the topic's own cursor; cursor, a channel's; and cursors, which is these and the
// channels. An arrow goes from the topic and a channel to their parts, and from a cursor to the
// backlog and the log; none goes back.
//
// It must not know connections or frames. Read nsqd/broker next.
package queue
