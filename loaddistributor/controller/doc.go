// Package controller is the single writer of the control plane. It reads a
// snapshot of the catalog, lets loaddistributor/placement decide, commits the
// event, and then tells brokers, the adaptor and watchers. It knows gRPC
// messages as data and no gRPC: loaddistributor/rpc and loaddistributor/lookup
// are the ways in, an Adaptor the way out.
//
// Two styles meet here. Creating and deleting a topic are procedures with a
// beginning and an end (create.go, delete.go): whatever fails in between, the
// catalog, the brokers and the adaptor are put back as they were. All else is
// level-triggered (reconcile.go): once a period, and when something has
// happened, what brokers and the adaptor should have is compared with what
// they are known to have, and the difference is asked for again.
//
// Lock order: names (one topic's procedures) before placing before mu. Nothing
// waits, sends or calls out while it holds mu.
package controller
