// Package replicated measures the cost of replication from the view of an application's
// clients. It compares
//
//   - our nsqd with --durability=memory, fsync, and replicated with one and with three NATS
//     JetStream servers;
//
//   - a stream of three JetStream servers, through NATS' Go client;
//
//   - with --upstream, the nsqd of the project NSQ, which keeps messages in memory.
//
//     go run ./bench replicated --nsqd bin/nsqd --nats bin/nats-server
//
// All servers run on this machine and share one disk, so replicas cost processor time and
// loopback traffic but no network. Each server is measured alone. Each round starts with
// another server:
//
//   - paced: publishers send at random times (Poisson), regardless of answers. Latency
//     counts from the scheduled send time until the acknowledgement, and until the
//     delivery.
//   - flood: publishers send as fast as possible, with a bounded number of unacknowledged
//     messages. NSQ's clients send one message per command, or many; JetStream's client
//     pipelines messages.
package replicated
