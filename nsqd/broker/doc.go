// Package broker runs the message machine of nsqd/queue: it owns the table of
// topics, the lock and the alarm of each, the hand-over of deliveries to
// subscribers, and the stats that are reported. Connections (nsqd/conn),
// HTTP (nsqd/httpapi) and the control plane (nsqd/agent) all act through it.
//
// A Topic is a runner, which takes the machine's steps under a lock, and what is built on it:
// intake accepts what is published, terms has the contract, store is the way to the log. They
// know the runner and not the topic.
//
// It must not know frames, sockets or gRPC.
//
// Lock order: Broker.mu, then runner.mu, then metrics.mu; none is held
// while a subscriber is notified or an alarm is set. Before both comes
// runner.storing, which only those wait for who publish to the same disk or
// empty or end it, and which is held while it is written to. The metadataWriter's and
// the health's locks are taken alone, or under runner.storing.
package broker
