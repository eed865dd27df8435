package fleet

import "errors"

// errAgain means that the operation would block. An event follows when it can continue.
var errAgain = errors.New("would block")

// event is a change of one connection. Both flags may be set. An event may be spurious; the
// next read or write finds out.
type event struct {
	slot     int32
	readable bool // bytes, an end or an error can be read
	writable bool // connected, or writable after errAgain
}
