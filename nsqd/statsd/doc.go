// Package statsd pushes a broker's stats to a statsd daemon over UDP, under the paths that
// nsqadmin and the documented Graphite configuration expect. A counter is sent as its growth
// since the last push.
//
// format.go formats stats as lines and packets and knows no clock or socket; push.go sends them.
// Source: the section "Statsd / Graphite Integration" of nsq.io/components/nsqd.html.
package statsd
