// Package police identifies a topic's publishers, limits their weights, and detects publishers that
// send more than advised. The package trusts no header field. It measures a publisher's rate. The
// weight is the smaller of the requested and the permitted weight. All connections of an identity
// are one publisher. An identity is as reliable as its issuer: a client_id, or an address of many
// publishers, is only as good as the network.
//
// The package is pure. pacing/fair computes the advice.
package police
