package nsqhttp

import (
	"io"
	"net/http"
	"sync/atomic"
	"time"
)

// Bodies bounds the memory of the bodies of all requests under way: what has been read
// of them. The zero value has no bound.
type Bodies struct {
	Limit int64 // bytes, set once; 0: none

	held    atomic.Int64  // bytes
	refused atomic.Uint64 // requests
}

// Held is how many bytes requests hold.
func (b *Bodies) Held() int64 { return b.held.Load() }

// Refused is how many requests were refused.
func (b *Bodies) Refused() uint64 { return b.refused.Load() }

// Hold returns a request's body, of which all that is read counts until Release.
func (b *Bodies) Hold(body io.ReadCloser) *Body { return &Body{ReadCloser: body, all: b} }

// Body is one of Bodies.
type Body struct {
	io.ReadCloser
	all  *Bodies
	held int64
}

var errBodies = &Fault{
	Status: http.StatusServiceUnavailable, Message: "TOO_MANY_REQUESTS", RetryAfter: time.Second,
	Detail: "the bodies of requests take as much memory as they may",
}

// Read fails with a Fault where all together are beyond the limit.
func (b *Body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if n > 0 {
		if fault := b.Grow(n); fault != nil {
			return n, fault
		}
	}
	return n, err
}

// Grow counts bytes that are made of what was read, and fails as Read does.
func (b *Body) Grow(n int) error {
	b.held += int64(n)
	if held := b.all.held.Add(int64(n)); b.all.Limit > 0 && held > b.all.Limit {
		b.all.refused.Add(1)
		return errBodies
	}
	return nil
}

// Release ends the holding, when nothing uses what was read.
func (b *Body) Release() { b.all.held.Add(-b.held) }
