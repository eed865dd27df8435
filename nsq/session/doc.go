// Package session is one client's side of a V2 conversation as a pure state
// machine. Bytes and times go in; operations for the driver, frames for the
// client and a deadline come out. It holds the rules of the protocol that need
// memory: what may be sent when, what IDENTIFY negotiated, that replies come
// in the order of the commands, heartbeats, and when to hang up.
//
// A driver (nsqd/conn) owns the socket, the read buffer, the clock and the
// deliveries, and runs this loop:
//
//	for {
//		n, op := s.Step(buf, now)      // buf: what was read and not consumed
//		if op.Kind != OpNone {
//			err := carryOut(&op)       // op's slices point into buf
//			s.Done(op, err)
//		}
//		buf = buf[n:]
//		if n == 0 && op.Kind == OpNone { break } // read until s.Need() bytes are there
//	}
//	write(s.Output()); s.ClearOutput()
//	if closing, cause := s.Closing(); closing { ... }
//	// at s.Deadline(): s.Tick(now), then write and look at Closing as above
//
// The package must not know topics, queues, goroutines or sockets, and reads
// no clock. The codec is nsq/wire; read nsqd/conn next.
package session
