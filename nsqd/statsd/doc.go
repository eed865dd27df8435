// Package statsd pushes a broker's stats to a statsd daemon over UDP, in the
// paths that nsqadmin and the documented Graphite configuration expect. Counters
// are sent as what they grew by since the push before.
//
// format.go turns stats into lines and packets and knows no clock or socket;
// push.go is the rest. Source: the section "Statsd / Graphite Integration" of
// nsq.io/components/nsqd.html.
package statsd
