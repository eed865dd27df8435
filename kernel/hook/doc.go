// Package hook determines when each message's bytes reached this host. It opens the best source of
// arrival times that the kernel and the process's privileges allow, and hides the source behind one
// interface. The sources, best first, are an eBPF socket filter, socket timestamps, and the time
// after the read.
//
// A process has one Stamper. Each connection has a Conn, which only the connection's reader uses.
// The package starts no goroutine per connection and allocates nothing per message.
//
// The package must not know the protocol on the connection: a message is a range of stream offsets.
// The pure package kernel/stamp maps offsets to segment times. kernel/bpf runs in the kernel. Read
// docs/arrival-stamps.md next for the accuracy and the requirements of each source.
package hook
