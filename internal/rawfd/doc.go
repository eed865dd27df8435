// Package rawfd reads and writes descriptors in non-blocking mode without telling Go's
// scheduler, which need not know about a call that cannot block. It is for event loops on
// Linux; see internal/poll and kernel/hook.
//
// Blocking and UDP are for calls that do block. On other systems UDP handles one datagram
// at a time.
package rawfd
