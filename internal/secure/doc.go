// Package secure is how the control plane's programs trust each other: TLS and
// client certificates, bearer tokens with roles, and the rule that no daemon listens
// beyond loopback without them. Servers (loaddistributor, tbadaptor) and clients
// (nsqd's agent, srtm, iotpub, the loaddistributor towards a tbadaptor) take
// their flags, credentials and checks from here.
//
// What is read from files is read again when they have changed (fresh.go).
//
// It knows which methods of the API need which role (roles.go) and nothing of
// what they do. NSQ's own ports are nsqd's affair: TLS and AUTH as in NSQ, and over
// HTTP the tokens of this package. What an operator sets is in docs/operations.md.
package secure
