// Package poll waits for many descriptors in one goroutine with Linux's epoll, a timer
// and a wake-up. The event loops of brokers (nsqd/conn) and of emulated sensors
// (tools/iotpub) use it.
package poll
