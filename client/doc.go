// Package client publishes to SRTM topics: it asks the loaddistributor which
// broker is a publisher's, publishes there by NSQ's protocol, and follows when
// the assignment changes.
//
//	c, err := client.New(client.Config{Address: "127.0.0.1:4170"})
//	p, err := c.Publisher(ctx, "volumes", "loop-4711")
//	err = p.Publish(ctx, body) // nil: the broker has accepted it
//
// # What a return value guarantees
//
// Publish returns nil only after the broker's OK: the message was accepted.
// An error that is (errors.Is) ErrUnanswered says that the message was sent
// and that no answer came: it may have been accepted. Any other error says
// that it was not accepted.
//
// A publish that was accepted is never sent again. One that was not is sent
// again until its context ends when that cannot duplicate it: because it never
// left this process, or because the broker ended the connection in order (a
// half-close after everything it read was answered, as a broker does that
// gives its publishers away). The latter duplicates only if the broker's
// process died between accepting and answering, which a publisher cannot tell from
// an end in order; no number goes with a message by which a broker could know it
// again ("What may come twice" in docs/protocol.md). After a connection that broke
// in any other way the publish fails with ErrUnanswered; Config.Resend changes
// either.
//
// # Order
//
// One publisher's messages are accepted in the order in which Publish was
// called, one after the other. A change of broker keeps it: the new connection
// is made first, then nothing more is sent to the old broker, its last answer
// is awaited, and the first publish goes to the new one.
//
// # Pacing
//
// Where a topic is paced, its broker tells publishers what they may send now, each in
// proportion to its weight, and Publish waits for its turn before it sends anything: an
// error for want of time says "not sent". Config.Pacing has other ways; Publisher.Pace
// and Config.OnPace tell callers that would rather thin out or combine what they have.
// A connection asks when it is made.
//
// The control plane is not on the message's way: when the loaddistributor
// cannot be reached, publishers go on where they are.
//
// The package must not know how brokers are chosen. Subscribers need nothing
// of it: they use go-nsq with the loaddistributor's HTTP address as lookupd.
// Conn is for one that trusts no broker.
package client
