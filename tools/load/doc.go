//go:build linux

// Package load gives brokers the same work and measures what becomes of it. A
// Scenario says what the work is, a Broker how one is started and spoken to, and
// Perform starts it, performs the work and returns the measurements. bench/peer is
// made of it, and the sender of bench/stamps.
//
// What is sent at a rate is sent open loop: latency counts from the instant at
// which a message was due, also if the sender was late. Latencies are of each
// delivery to each subscriber, in HDR histograms of 1 us to 60 s with three digits.
// Processor time is the broker's own, from /proc; allocations and collections are
// those of a Go broker that serves /debug/pprof.
//
// The load comes from the process that calls Perform, so all brokers share the
// machine with it alike: compare measurements as ratios. It is made light, and by one rule
// for all brokers:
//
//   - Go's poller watches none of its connections, and its threads have priority, or
//     waiting for a processor would count as the broker's latency (socket.go,
//     prompt.go);
//   - one thread sends, and wakes for each message; above 30,000 frames a second for
//     all that are due, every 50 us. Answers wait in the socket until a connection
//     has sent eight more frames, and are all counted in the end (publish.go);
//   - a subscriber reads what there is and acknowledges all of it in one write. Some
//     client libraries write for each message: they would cost every broker more.
//
// It knows brokers by their sockets only. Emulated sensors that move between the
// brokers of a cluster are tools/iotpub's. Read scenario.go next.
package load
