// Package bidi serves sessions: gRPC streams on which both sides send freely after a
// hello, for the lifetime of the peer. It does not interpret the messages.
// loaddistributor/rpc and tbadaptor/loop have services with sessions. The client's side
// differs and is in nsqd/agent.
package bidi
