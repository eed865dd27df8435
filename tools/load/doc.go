//go:build linux

// Package load gives different brokers the same work and measures the result. A Scenario
// describes the work. A Broker describes how to start a broker and how to speak to it.
// Perform starts the broker, performs the work and returns the measurements. bench/peer and
// the sender of bench/stamps use this package.
//
// At a given rate the load is open loop: latency counts from the instant at which a message
// was due, even if the sender was late. Latency is measured per delivery and subscriber, in
// histograms of 1 us to 60 s, within 1 %. Processor time is the broker's, from
// /proc. Allocations and garbage collections come from /debug/pprof of Go brokers.
//
// The process that calls Perform produces the load, so every broker shares the machine with
// the load in the same way: compare measurements as ratios. The same rules keep the load
// light for every broker:
//
//   - Go's poller watches none of the connections, and the load's threads have priority.
//     Otherwise the load's wait for a processor would count as the broker's latency
//     (socket.go, prompt.go).
//   - One thread sends, and wakes for each message. Above 30,000 frames a second the
//     thread wakes every 50 us and sends all messages that are due. The sender reads
//     a connection's replies after eight more frames, and counts all replies at the end
//     (publish.go).
//   - A subscriber reads all available deliveries and acknowledges them in one write. Some
//     client libraries write once per message, which would cost every broker more.
//
// Package load knows brokers only by their sockets. tools/iotpub emulates sensors that move
// between the brokers of a cluster. Read scenario.go next.
package load
