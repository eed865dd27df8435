// Package migrate imports once the messages, topics and channels that NSQ's nsqd has left in a
// folder. It writes the messages into logs. The package knows NSQ's formats, and must not know
// the format of a cursor. Read migrate.go next; nsq.go reads NSQ's files.
package migrate
