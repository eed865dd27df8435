// Package lookup answers the HTTP questions that NSQ's stock clients and tools
// put to nsqlookupd, from what the controller knows, so that an unmodified
// consumer finds the brokers of a topic. It knows no placement: a broker
// produces a topic when its Directory says so.
package lookup
