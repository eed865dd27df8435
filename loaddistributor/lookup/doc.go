// Package lookup is nsqlookupd on top of what the controller and package
// registry know: stock consumers and tools ask it over HTTP where a topic is
// (lookup.go), and nodes that have no agent, such as NSQ's own nsqd, register
// with it over TCP (nodes.go). directory.go puts the brokers of both together.
//
// It knows no placement: a broker produces a topic when its Cluster says so, or
// when it registered it.
package lookup
