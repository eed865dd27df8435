// Package publishers drives the three ways in of publishers that know nothing
// of SRTM, on a cluster of processes: asking the loaddistributor over HTTP where
// to publish, HTTP /pub on any broker of the topic, and `srtm agent`, which a
// stock NSQ producer takes for an nsqd. It is all tests. What each way guarantees
// in detail is tested beside it: loaddistributor/lookup, nsqd/httpapi,
// tools/srtm/agent.
package publishers
