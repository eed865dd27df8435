// Package commitlog keeps a topic's messages in the order of their acceptance: one
// log for each topic, in which each channel has a cursor. It knows records and
// offsets, and must not know what a cursor is, nor a topic: a snapshot of cursors
// is a string of bytes to it.
//
// Log is what nsqd/broker relies on; logtest has what each implementation must
// pass. Read log.go next.
package commitlog
