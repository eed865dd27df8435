// Package session is the server's side of one client's V2 conversation, as a pure state machine.
// Its inputs are bytes and times. Its outputs are operations for the driver, frames for the client,
// and a deadline. It implements the rules of the protocol that need state: which command is allowed
// when, the results of IDENTIFY, the order of replies, heartbeats, and when to close.
//
// A driver (nsqd/conn) owns the socket, the read buffer, the clock and the deliveries, and runs
// this loop:
//
//	for {
//		n, op := s.Step(buf, now)      // buf: bytes that were read and not consumed
//		if op.Kind != OpNone {
//			err := carryOut(&op)       // op's slices point into buf
//			s.Done(op, err)
//		}
//		buf = buf[n:]
//		if n == 0 && op.Kind == OpNone { break } // read until s.Need() bytes are there
//	}
//	write(s.Output()); s.ClearOutput()
//	if closing, cause := s.Closing(); closing { ... }
//	// at s.Deadline(): s.Tick(now), then write and check Closing as above
//
// The package must not know topics, queues, goroutines or sockets, and reads no clock. The codec is
// nsq/wire; read nsqd/conn next.
package session
