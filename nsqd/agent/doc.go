// Package agent is the broker's side of the control plane. The agent registers the broker with the
// loaddistributor, creates and removes topics on request, applies the adaptor's grants in epoch order,
// and sends reports. Sockets, queues and messages are hidden behind Node. The data path never waits for
// the agent: without a control plane the broker keeps its shares.
//
// owner.go has the goroutine that calls the Node; only orders.go calls the Node beside the owner, to
// change channels. keep.go renews the lease and stores bases, capture.go sends recorded arrivals, and
// link.go keeps a session open. tbadaptor/holder computes which shares the broker holds, and for how
// long. The peers are loaddistributor/rpc and tbadaptor/loop.
package agent
