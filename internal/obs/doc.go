// Package obs is what every daemon shows of itself: its logger and the keys
// of its attributes, its metrics registry, the debug routes, its version, and
// the one latency histogram that all of them can merge. It knows nothing of
// what is measured; each metric is owned by the package that counts it.
// docs/operations.md lists what there is to see.
package obs
