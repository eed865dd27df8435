// Package commitlog keeps the messages of each topic in one log, in the order of acceptance. Each
// channel has a cursor in its topic's log. The package knows records and offsets, and must not
// know cursors or topics: a snapshot of cursors is an opaque string of bytes.
//
// nsqd/broker relies on the interface Log; logtest has the tests for every implementation. Read
// log.go next.
package commitlog
