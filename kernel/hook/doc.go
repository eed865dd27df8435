// Package hook tells when each message's bytes reached this host. It opens
// the best source of arrival times that the kernel and its privileges allow
// (an eBPF socket filter, else socket timestamps, else the time after the
// read), and hides behind one interface which of them it is.
//
// A Stamper belongs to a process, a Conn to the one goroutine that reads a
// connection. Nothing here starts a goroutine per connection, and nothing
// allocates per message.
//
// The package must not know the protocol spoken on the connection: a message
// is a range of stream offsets to it. How an offset becomes a segment's time
// is kernel/stamp, which is pure; what runs in the kernel is kernel/bpf. Read
// docs/arrival-stamps.md next for what each source is worth and needs.
package hook
