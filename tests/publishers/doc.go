// Package publishers tests the three entry points for publishers that know nothing of SRTM, on a
// cluster of processes: the loaddistributor's HTTP answer where to publish, HTTP /pub on any broker
// of the topic, and `srtm agent`, which acts as an nsqd for a stock NSQ producer. The package contains
// only tests. Tests beside each entry point check its guarantees in detail: loaddistributor/lookup,
// nsqd/httpapi, tools/srtm/agent.
package publishers
