// Package rawfd reads and writes descriptors in non-blocking mode without
// telling Go's scheduler, which need not know of a call that cannot block. It
// is for event loops; Linux only. See internal/poll and kernel/hook.
//
// Blocking and UDP are for calls that do block; UDP is one datagram at a time elsewhere.
package rawfd
