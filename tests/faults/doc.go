// Package faults runs a cluster of real processes, its adaptor embedded or a
// process of its own, offers it twice its contract, and meanwhile kills and stops
// processes, cuts the network between brokers and the control plane, by a proxy that
// swallows what passes, raises and lowers the contract, deletes and creates the topic, and
// has two adaptors at once; or moves the adaptor from one place to the other. Then it
// merges the release traces of all brokers and checks on them, exactly and for every
// interval, the contract that was acknowledged, with the former shares that the answers
// named (promises_test.go). A broker by itself is paused, stopped, filled and restarted,
// and held to the same.
package faults
