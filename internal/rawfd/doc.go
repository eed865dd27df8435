// Package rawfd reads and writes descriptors in non-blocking mode without Go's
// scheduler, which need not know about a call that cannot block. It is for event loops on
// Linux; see kernel/hook. Poller waits for many descriptors in one goroutine, with a timer
// and a wake-up. The event loops of brokers (nsqd/conn) and of emulated sensors
// (tools/iotpub) use it.
//
// Blocking and UDP are for calls that do block. On other systems UDP handles one datagram
// at a time.
package rawfd
