// Package broker runs the queue machine of nsqd/queue. It owns the table of topics, the
// lock and the alarms of each topic, the hand-over of deliveries to subscribers, and the
// reported stats. Connections (nsqd/conn), HTTP (nsqd/httpapi) and the control plane
// (nsqd/agent) use the broker.
//
// A Topic consists of a runner, which executes the machine's steps under a lock, and parts
// on top of the runner: intake accepts publications, terms holds the contract, store
// accesses the log. The parts know the runner but not the topic.
//
// The package must not know frames, sockets or gRPC.
//
// Lock order: runner.storing, then Broker.mu, then runner.mu, then metrics.mu. No lock is
// held while a subscriber is notified or an alarm is set, except runner.storing.
// runner.storing is held during writes to the disk; only publishers to the same disk wait
// for it, and callers that empty or end the topic. The locks of metadataWriter and health
// are taken alone, or under runner.storing.
package broker
