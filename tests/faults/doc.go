// Package faults runs a cluster of real processes, with the adaptor embedded or in a separate process,
// and offers the cluster twice its contract. Meanwhile the tests kill and stop processes, cut the
// network between brokers and the control plane with a proxy that drops all bytes, raise and lower the
// contract, delete and create the topic, and run two adaptors at once; or they move the adaptor from
// one place to the other. Then they merge the release traces of all brokers. They check the traces,
// exactly and for every interval, against the acknowledged contract, with the former shares that the
// answers named (promises_test.go). A standalone broker is paused, stopped, filled and restarted, and
// must keep the same contract. TestPartitionsLoseNoMessage runs each process in a network namespace, and cuts the
// links between pairs of namespaces.
package faults
