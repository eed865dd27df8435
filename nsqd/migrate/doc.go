// Package migrate brings the messages, topics and channels that another broker has
// left in a folder into logs, once: of SRTM's nsqd before it had logs, and of NSQ's
// nsqd. It knows formats, and must not know what a cursor looks like. Read migrate.go
// next; ours.go and nsq.go read what there is.
package migrate
