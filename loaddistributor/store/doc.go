// Package store keeps the control plane's events: what was appended is there
// after a crash, in its order, and one process at a time appends. Bolt is a file
// of one process, Etcd is shared by several of which one leads, Memory is for
// clusters that are thrown away; one suite of tests runs over all of them.
//
// It knows how an event is written down (record.go) and nothing of what it
// means: loaddistributor/catalog decides that, loaddistributor/controller when to
// append. Read store.go next for what an implementation guarantees.
package store
