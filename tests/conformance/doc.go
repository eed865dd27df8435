// Package conformance tells whether a program behaves as nsqd 1.3 does, from
// the outside: raw bytes over TCP, HTTP requests, signals and flags. It is all
// tests. They know the public documentation of NSQ and what its client
// libraries rely on; they must not know, and do not import, nsqd's own
// packages, so that a mistake of our codec cannot hide from them.
//
// What runs is chosen by environment:
//
//	(nothing)                    builds this repository's nsqd and starts it, and then
//	                             NSQ's own (upstream_test.go)
//	SRTM_CONFORMANCE_NSQD=path   starts that nsqd instead, of whatever origin
//	SRTM_CONFORMANCE_TCP=addr    uses one that runs already; with
//	SRTM_CONFORMANCE_HTTP=addr   this one. Cases that need flags are skipped
//
// Every case holds for upstream's nsqd, but for the deliberate differences of
// lists_test.go, where each side is asserted to behave as the list says.
//
// Most cases are scripts: testdata/README.md says how they read. The others are Go;
// harness_test.go says how those are written.
package conformance
