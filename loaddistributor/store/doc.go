// Package store keeps the control plane's events durable and in order. One process at a
// time appends. Bolt is a file of one process. Etcd is shared by several processes, and
// one of them leads. Memory is for temporary clusters. One suite of tests runs over all
// three.
//
// The package encodes events (record.go) but does not interpret them.
// loaddistributor/catalog applies events, and loaddistributor/controller decides when to
// append. Read store.go next for the guarantees of a store.
package store
