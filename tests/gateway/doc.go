// Package gateway tests the whole gateway: the program, with clients and servers on sockets. The
// servers' processors, disks and networks are virtual: timers, so that two processors suffice.
package gateway
