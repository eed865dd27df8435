// Package lookup is an nsqlookupd over the controller and package registry. Stock
// consumers and tools query it over HTTP for the producers of a topic (lookup.go). Nodes
// without an agent, such as NSQ's own nsqd, register over TCP (nodes.go). directory.go
// joins the brokers of both sources.
//
// The package has no placement logic. A broker produces a topic if the Cluster says so,
// or if the broker registered the topic.
package lookup
