// Package faults runs a cluster of real processes, its adaptor embedded or a
// process of its own, offers it twice its contract, and meanwhile kills and stops
// processes, cuts the network between brokers and the control plane, by a proxy that
// swallows what passes, changes the contract, and has two adaptors at once; or moves the
// adaptor from one place to the other. Then it
// merges the release traces of all brokers and checks the contract on them, exactly
// and for every interval. A broker by itself is paused, stopped, filled and restarted,
// and held to the same.
package faults
