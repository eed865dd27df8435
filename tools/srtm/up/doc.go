// Package up is `srtm up`: it starts a whole cluster on this machine with a topic, a
// contract, emulated sensors and a subscriber. It shows a live view, and reports whether
// every accepted message arrived exactly once, and how SRTM's placement compares with a
// blind split. The package only drives: tools/srtm/cluster and tools/iotpub supply the
// processes, and all requests to the cluster use the public API.
//
// A run (run.go) starts the cluster and calibrates: it finds a load that this machine
// carries, and the machine's delays. Then it derives the contract (derive.go). It runs
// one phase with SRTM's placement and one with a split over all brokers, with the same
// publishers, contract and seed. Finally it reports.
package up
