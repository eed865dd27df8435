// Package obs has what every daemon shows of itself: the logger and its attribute keys,
// the metrics registry, the debug routes, the version, and the latency histogram that all
// daemons can merge. Each metric belongs to the package that counts it.
// docs/metrics.md lists all of them.
package obs
