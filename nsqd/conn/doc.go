// Package conn drives client sessions over sockets: it accepts, reads into the
// connection's buffer, lets nsqd/session make sense of the bytes, acts on the
// broker for it, and writes what comes back. All decisions about the protocol
// are the session's; all about messages are the broker's.
//
// The driver here is a goroutine per connection, and a second one for a
// subscriber's writes. Another driver (an event loop over many sockets) can
// stand beside it: sessions and subscriptions know nothing of goroutines.
package conn
