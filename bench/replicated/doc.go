// Package replicated measures what it costs to have messages in more places, as the
// clients of an application see it: our nsqd with --durability=memory, fsync and
// replicated, of one server of NATS JetStream and of three; a stream of three JetStream
// servers through NATS' own Go client; and, where --upstream names it, NSQ's nsqd, which
// has messages in memory.
//
//	go run ./bench replicated --nsqd bin/nsqd --nats bin/nats-server
//
// All servers run on this machine, on one disk, so that replicas cost processor time and
// loopback, and no network. Each is measured alone, in turns, each round another first:
//
//   - paced: publishers that send at random times (Poisson), whatever is answered; the time
//     from when a message was to be sent until it is acknowledged, and until it is delivered;
//   - flood: as fast as it goes, a bounded number of messages not acknowledged. NSQ's
//     clients send one message per command, or many; JetStream's client sends many at once.
package replicated
