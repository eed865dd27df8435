// Package link simulates the transport of the Improved EFXCP paper, packet by
// packet: flows of different ToS both ways over one bottleneck link, a FIFO queue
// with drop-tail and an ACK path, and a router at each end that tells flows what
// to send. The paper's rules are here, paper.go and window.go; those to compare them
// with are the production's, pacing/fair and pacing/police. It is pure: the same Config
// gives the same Result. Read Run next; tools/drlsim is its command.
package link
