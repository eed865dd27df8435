// Package wire is the NSQ V2 protocol as bytes: the commands a client sends,
// the frames a server answers with, the names, limits and error codes both
// agree on. Each direction is here twice, encoded and parsed, so that nsqd,
// our own clients and the tests share one codec.
//
// It is pure. Parsers work in place on the caller's buffer and say how many
// bytes they want; encoders append to the caller's slice. The package must not
// know connections, what a command means, or whether a client may send it now:
// that is nsq/session, which is the place to read next.
//
// Source: the public "TCP Protocol Spec" and "Building Client Libraries" pages
// of nsq.io, and what the go-nsq, pynsq and nsqjs client libraries send and
// expect. Where these leave a choice, the choice is written at the code that
// makes it.
package wire
