//go:build linux

// Package peer compares brokers on the same work in one run: ours, any broker with the NSQ
// protocol, NATS, Redis streams and mosquitto.
//
//	go run ./bench peer --list
//	go run ./bench peer --scenarios=poisson-1000 --nsq=upstream=/path/to/nsqd --json=out.json
//
// With --loaddistributor our broker is also measured in a cluster of two: with publishers
// at the broker of the topic, and with publishers at the other broker, which forwards.
//
// With --before an earlier build of our broker is measured, too. With --ttl our broker is also
// measured with a TTL and dead letters that no message reaches.
//
// In each round every broker starts anew and gets the same work by the same schedule. The
// tables show medians of the rounds. The column "least p99" shows the least disturbed
// round. tools/load performs and measures the work. Some columns describe the disturbances:
//   - late p99 is the delay of the sender. A broker only causes it by using the processor.
//   - load us/msg is the processor time of the load.
//   - others % is the share of processor time that neither the load nor the broker used, in
//     the worst round. If it is high, repeat the measurement.
package peer
