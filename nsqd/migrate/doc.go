// Package migrate brings the messages, topics and channels that NSQ's nsqd has left in a
// folder into logs, once. The package knows NSQ's formats, and must not know the format of
// a cursor. Read migrate.go next; nsq.go reads NSQ's files.
package migrate
