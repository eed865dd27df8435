// Package poll waits for many descriptors in one goroutine: Linux's epoll, with
// a timer and a wake-up. Brokers (nsqd/conn) and emulated sensors (tools/iotpub)
// have their loops around it. It knows nothing of what the descriptors are.
package poll
