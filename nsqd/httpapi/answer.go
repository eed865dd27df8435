package httpapi

import (
	"bytes"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/nsq/nsqhttp"
)

// maxListings limits how many answers that list all topics are built at a time. Further requests wait.
const maxListings = 2

// answers limits the memory of answers that list all topics or peek at messages. With thousands of
// topics such an answer takes megabytes until its client has read it, and any client may request
// many at once.
type answers struct {
	// Set once.
	limit int64 // bytes; 0: no limit
	slots chan struct{}

	bytes   atomic.Int64
	refused atomic.Uint64
}

// answer collects an answer in memory.
type answer struct {
	http.ResponseWriter
	code int
	body bytes.Buffer
}

func (w *answer) WriteHeader(code int)        { w.code = code }
func (w *answer) Write(p []byte) (int, error) { return w.body.Write(p) }

// bounded returns h with its answers counted until they are written. An answer over the limit is
// refused, unless it is the only one.
func (a *answers) bounded(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		select {
		case a.slots <- struct{}{}:
		case <-r.Context().Done():
			return
		}
		response := &answer{ResponseWriter: w, code: http.StatusOK}
		func() {
			defer func() { <-a.slots }()
			h(response, r)
		}()
		size := int64(response.body.Cap())
		bytes := a.bytes.Add(size)
		defer a.bytes.Add(-size)
		if a.limit > 0 && bytes > a.limit && bytes > size {
			a.refused.Add(1)
			(&nsqhttp.Fault{
				Status: http.StatusServiceUnavailable, Message: "TOO_MANY_REQUESTS", RetryAfter: time.Second,
				Detail: "answers that are not read yet take as much memory as they may",
			}).Write(w)
			return
		}
		w.WriteHeader(response.code)
		_, _ = w.Write(response.body.Bytes()) // an error means that the client is gone
	}
}
