//go:build linux

// Command peer measures brokers beside each other: ours, any that speaks NSQ's
// protocol, NATS, Redis streams and mosquitto, on the same work in one run.
//
//	go run ./bench/peer --list
//	go run ./bench/peer --scenarios=poisson-1000 --nsq=upstream=/path/to/nsqd --json=out.json
//
// Each round starts every broker anew, one after the other, and gives it the
// same work by the same schedule. Figures are medians of the rounds, and the least
// p99, of the round that was disturbed least. What is sent at a rate is sent open
// loop: latency counts from the instant at which a message was due, also if the
// sender was late. Latencies are of each delivery to each subscriber, in HDR
// histograms of 1 us to 60 s with three digits. Processor time is the broker's
// own, from /proc; allocations and collections are those of a Go broker that
// serves /debug/pprof.
//
// The load comes from this process, so all brokers share the machine with it
// alike: hold figures as ratios. It is made light, and by one rule for all brokers:
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
// What it costs is in the tables, as load us/msg, beside the broker's CPU. late p99
// says how late it sent, which no broker is to blame for but by taking the
// processor; others % is what neither it nor the broker used of all processor time
// in the worst round: repeat what was disturbed.
//
// It does not build on tools/iotpub, which nothing may import and which speaks NSQ
// alone: a writer with one thread and a table of protocols is less than either would
// need of the other.
//
// It knows brokers by their sockets only. Read scenario.go next.
package main
