package fleet

import (
	"errors"

	"github.com/srtm-io/srtm/internal/mono"
)

// errAgain means: nothing now, an event will say when.
var errAgain = errors.New("would block")

// maxEvents bounds the answers handled between two looks at the schedule.
const maxEvents = 128

// event is what a poller noticed of one connection. Flags may come together,
// and may come for nothing; reading or writing tells.
type event struct {
	slot     int32
	readable bool // bytes, an end or an error can be read
	writable bool // connected, or room after errAgain
}

// poller moves bytes without blocking. All methods but wake belong to the
// worker's thread. A slot is the worker's number for a connection, free for
// another after close.
//
// Events are edges: after one says readable, the next comes only when more
// bytes arrive after read returned less than it was asked for. A slot that was
// closed must not be dialled again while events from before are unhandled.
type poller interface {
	// dial starts to connect; an event says writable when it is done. An error
	// means that the slot was not taken.
	dial(slot int32, address string) error
	// connected returns nil when the dial has ended well, errAgain while it has
	// not ended, or why it failed.
	connected(slot int32) error
	// read returns bytes, or errAgain, or what ended the connection (io.EOF).
	read(slot int32, p []byte) (int, error)
	// write returns how many bytes were taken; fewer than all come with
	// errAgain, or with what ended the connection.
	write(slot int32, p []byte) (int, error)
	close(slot int32)
	// wait appends events to dst, and returns as soon as there is one, or wake
	// was called, or the time `until` has come; at once if it has passed.
	wait(dst []event, until mono.Time) ([]event, error)
	// wake makes wait return; from any goroutine, also after shutdown.
	wake()
	// shutdown closes what is left. Nothing but wake may follow.
	shutdown()
}
