// Package bidi serves sessions: gRPC streams on which both sides talk as
// they please after a hello, for as long as the peer lives. It knows nothing
// of what is said. The two services that have sessions are in
// loaddistributor/rpc and tbadaptor/loop; the client's side, which differs, is
// in nsqd/agent.
package bidi
