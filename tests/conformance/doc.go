// Package conformance checks whether a program behaves as nsqd 1.3 does, from the outside: raw bytes
// over TCP, HTTP requests, signals and flags. The package contains only tests. They know the public
// documentation of NSQ and the behaviour that its client libraries rely on. They must not import
// nsqd's own packages, so that a mistake of our codec cannot hide from them.
//
// Environment variables select the program under test:
//
//	(nothing)                    builds this repository's nsqd and starts it, and then
//	                             NSQ's own (upstream_test.go)
//	SRTM_CONFORMANCE_NSQD=path   starts that nsqd instead, of whatever origin
//	SRTM_CONFORMANCE_TCP=addr    uses one that runs already; with
//	SRTM_CONFORMANCE_HTTP=addr   this one. Cases that need flags are skipped
//
// Every case holds for upstream's nsqd, apart from the deliberate differences of lists_test.go, where
// each side must behave as the list states.
//
// Most cases are scripts: testdata/README.md explains their format. The others are Go; harness_test.go
// explains how to write them.
package conformance
