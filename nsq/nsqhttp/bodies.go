package nsqhttp

import (
	"io"
	"net/http"
	"sync/atomic"
	"time"
)

// Bodies bounds the memory of all request bodies in progress, as far as they have been
// read. The zero value has no bound.
type Bodies struct {
	Limit int64 // bytes, set before use; 0: none

	held    atomic.Int64  // bytes
	refused atomic.Uint64 // requests
}

// Held returns the number of bytes held by requests.
func (b *Bodies) Held() int64 { return b.held.Load() }

// Refused returns the number of refused requests.
func (b *Bodies) Refused() uint64 { return b.refused.Load() }

// Hold returns a request's body whose read bytes count until Release.
func (b *Bodies) Hold(body io.ReadCloser) *Body { return &Body{ReadCloser: body, all: b} }

// Body is a request's body that counts in Bodies.
type Body struct {
	io.ReadCloser
	all  *Bodies
	held int64
}

var errBodies = &Fault{
	Status: http.StatusServiceUnavailable, Message: "TOO_MANY_REQUESTS", RetryAfter: time.Second,
	Detail: "the bodies of requests take as much memory as they may",
}

// Read fails with a Fault if all bodies together exceed the limit.
func (b *Body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if n > 0 {
		if fault := b.Grow(n); fault != nil {
			return n, fault
		}
	}
	return n, err
}

// Grow counts bytes derived from the body, and fails as Read does.
func (b *Body) Grow(n int) error {
	b.held += int64(n)
	if held := b.all.held.Add(int64(n)); b.all.Limit > 0 && held > b.all.Limit {
		b.all.refused.Add(1)
		return errBodies
	}
	return nil
}

// Release stops counting the body. Requires: nothing uses its bytes any more.
func (b *Body) Release() { b.all.held.Add(-b.held) }
