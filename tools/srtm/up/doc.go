// Package up is `srtm up`: a whole cluster on this machine, a topic with a
// contract, emulated sensors and a subscriber, a live view, and a report that
// says whether every accepted message came exactly once and what SRTM's
// placement is worth against a blind split. It only drives: the processes are
// tools/srtm/cluster's and tools/iotpub's, and everything it asks of the
// cluster goes through the public API.
//
// A run (run.go) is: start the cluster; calibrate, which finds out what load
// this machine carries and how late it is; derive the contract (derive.go); one
// phase with SRTM's placement and one with a split over all brokers, with the
// same publishers, contract and seed; report.
package up
