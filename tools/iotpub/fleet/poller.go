package fleet

import (
	"errors"

	"github.com/srtm-io/srtm/internal/mono"
)

// errAgain means that the operation would block. An event follows when it can continue.
var errAgain = errors.New("would block")

// maxEvents bounds the events handled before the worker checks the schedule again.
const maxEvents = 128

// event is a change of one connection. Both flags may be set. An event may be spurious; the
// next read or write finds out.
type event struct {
	slot     int32
	readable bool // bytes, an end or an error can be read
	writable bool // connected, or writable after errAgain
}

// poller moves bytes without blocking. Only the worker's thread calls the methods, except
// wake. A slot is the worker's number for a connection, and may be reused after close.
//
// Events are edge-triggered. After a readable event, the next event comes only when more
// bytes arrive after a short read. A closed slot must not be dialled again while older
// events are unhandled.
type poller interface {
	// dial starts to connect. A writable event reports the end of dialling. After an error
	// the slot remains free.
	dial(slot int32, address string) error
	// connected returns nil if the connection is established, errAgain while dialling, or
	// the error of the dial.
	connected(slot int32) error
	// read returns bytes, errAgain, or the error that ended the connection (io.EOF).
	read(slot int32, p []byte) (int, error)
	// write returns the number of bytes written. A short write returns errAgain, or the
	// error that ended the connection.
	write(slot int32, p []byte) (int, error)
	close(slot int32)
	// wait appends events to dst. wait returns when there is an event, after wake, or at
	// the time until.
	wait(dst []event, until mono.Time) ([]event, error)
	// wake makes wait return. Any goroutine may call wake, even after shutdown.
	wake()
	// shutdown closes all connections. Only wake may be called afterwards.
	shutdown()
}
