package httpapi

import (
	"bytes"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/internal/nsqhttp"
)

// making is how many answers that list all topics are made at a time. Others wait.
const making = 2

// answers bounds the memory of those, and of what peeks at messages: with thousands of topics
// each takes megabytes until its reader has taken it, and anyone may ask, over all connections
// at once.
type answers struct {
	// Set once.
	limit int64 // bytes; 0: none
	slots chan struct{}

	held    atomic.Int64
	refused atomic.Uint64
}

// answer is one that is made in memory first.
type answer struct {
	http.ResponseWriter
	code int
	body bytes.Buffer
}

func (w *answer) WriteHeader(code int)        { w.code = code }
func (w *answer) Write(p []byte) (int, error) { return w.body.Write(p) }

// bounded is h, whose answer counts while it is written; beyond the limit it is refused,
// unless it is the only one.
func (a *answers) bounded(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		select {
		case a.slots <- struct{}{}:
		case <-r.Context().Done():
			return
		}
		whole := &answer{ResponseWriter: w, code: http.StatusOK}
		func() {
			defer func() { <-a.slots }()
			h(whole, r)
		}()
		size := int64(whole.body.Cap())
		held := a.held.Add(size)
		defer a.held.Add(-size)
		if a.limit > 0 && held > a.limit && held > size {
			a.refused.Add(1)
			(&nsqhttp.Fault{
				Status: http.StatusServiceUnavailable, Message: "TOO_MANY_REQUESTS", RetryAfter: time.Second,
				Detail: "answers that are not read yet take as much memory as they may",
			}).Write(w)
			return
		}
		w.WriteHeader(whole.code)
		_, _ = w.Write(whole.body.Bytes()) // the client is gone
	}
}
