// Package client publishes to SRTM topics. It gets a publisher's broker
// from the loaddistributor, publishes there with the NSQ protocol, and follows changes of the assignment.
//
//	c, err := client.New(client.Config{Address: "127.0.0.1:4170"})
//	p, err := c.Publisher(ctx, "volumes", "loop-4711")
//	err = p.Publish(ctx, body) // nil: the broker has accepted it
//
// The examples run as they are, with small servers for tests from package fake.
//
// # What a return value guarantees
//
// Publish returns nil only after the broker's OK: the message was accepted. If the error is
// (errors.Is) ErrUnanswered, the message was sent but not answered, and may have been
// accepted. Any other error means that the message was not accepted.
//
// An accepted publish is never sent again. Other publishes are sent again until their
// context ends, if this cannot cause a duplicate: the publish never left this process, or
// the broker ended the connection in an orderly way. In an orderly end, the broker answers
// everything that it has read, and then half-closes. Brokers end connections in this way when
// they hand off their publishers. If a broker's process dies between accepting and answering,
// the publisher also sees an orderly end, and sends a duplicate. Messages have no number by which a
// broker could recognise a duplicate ("What may come twice" in docs/protocol.md). If a
// connection breaks in another way, the publish fails with ErrUnanswered. Config.Resend
// changes both rules.
//
// # Order
//
// A publisher's messages are accepted in the order of the calls of Publish, one after the
// other. A change of broker keeps the order. The publisher first connects to the new
// broker. Then the publisher stops sending to the old broker and waits for the old broker's last
// answer. Then the publisher sends to the new broker.
//
// # Pacing
//
// On a paced topic, the broker advises each publisher of its current rate, in proportion to
// its weight. Publish waits for its turn before it sends anything; if time runs out, the
// error says "not sent". Config.Pacing has other modes. Publisher.Pace and Config.OnPace
// inform callers that prefer to thin out or combine messages. A new connection requests
// advice.
//
// Messages do not pass through the control plane. While the loaddistributor is unreachable,
// publishers continue with their brokers.
//
// The package must not know how brokers are chosen. Subscribers do not need the package:
// they use go-nsq with the loaddistributor's HTTP address as lookupd. Conn serves clients
// that trust no broker.
package client
