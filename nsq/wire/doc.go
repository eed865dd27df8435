// Package wire is the wire format of the NSQ V2 protocol: the client's commands, the server's
// frames, and the names, limits and error codes of both. Each direction has an encoder and a
// parser, so that nsqd, our clients and the tests share one codec.
//
// The package is pure. Parsers work in place on the caller's buffer and return how many bytes they
// need. Encoders append to the caller's slice. The package must not know connections, the meaning
// of a command, or whether a client may send a command now. Those are in nsq/session, which is the
// place to read next.
//
// Source: the public "TCP Protocol Spec" and "Building Client Libraries" pages of nsq.io, and the
// behavior of the client libraries go-nsq, pynsq and nsqjs. Where these sources leave a choice, the
// comment at the code explains ours.
package wire
