// Package names maps the topic names of MQTT to the topics and channels of SRTM. It validates and
// matches names and filters, reads the rules of the mapping, encodes the record attribute that keeps a
// message's MQTT name, and makes the CloudEvents envelope for NSQ consumers.
//
// The package must not know sessions or packets. Read mqtt/session next.
package names
