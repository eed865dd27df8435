// Package link simulates the transport of the Improved EFXCP paper, packet by
// packet: flows of different ToS both ways over one bottleneck link, a FIFO queue
// with drop-tail and an ACK path, and a router at each end that tells flows what
// to send. The rules are the production's, pacing/fair and pacing/sender; this
// package knows only packets and when they are where. It is pure: the same Config
// gives the same Result. Read Run next; tools/drlsim is its command.
package link
