// Package link simulates the transport of the Improved EFXCP paper, packet by packet.
// Flows of different ToS send in both directions over one bottleneck link. The link has a
// FIFO queue with drop-tail, an ACK path, and a router at each end that sends rates to the
// flows.
// paper.go and window.go have the paper's rules. The rules of production, for comparison,
// are pacing/fair and pacing/police. The package is pure: the same Config gives the same
// Result. Start with Run; tools/drlsim is the command.
package link
