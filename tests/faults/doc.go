// Package faults runs a cluster of real processes, an adaptor of its own among
// them, offers it twice its contract, and meanwhile kills processes and cuts the
// network between brokers and the control plane, by a proxy that swallows what
// passes. Then it merges the release traces of all brokers and checks the
// contract on them, exactly and for every interval.
package faults
