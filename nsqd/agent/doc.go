// Package agent is the broker's side of the control plane: it registers the
// broker with the loaddistributor, creates and removes topics on its word,
// applies the adaptor's grants in the order of their epochs, and reports. It
// knows nothing of sockets, queues or messages (they are behind Node), and the
// data path never waits for it: without a control plane a broker goes on with
// the shares it holds.
//
// tbadaptor/holder says what is held, and until when. owner.go is the one goroutine that
// calls the Node, but for orders.go, which changes channels beside it; keep.go is what it does for the lease, capture.go for those who want
// to know when messages arrived. link.go keeps a session open. The other ends are
// loaddistributor/rpc and tbadaptor/loop.
package agent
