package proxy

import (
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"golang.org/x/net/http/httpguts"
)

const (
	// lingerFor is how long the rest of a body is read and dropped after an early answer. If a
	// connection closes while its client still sends, the answer may be lost.
	lingerFor = time.Second
	// An unwanted body that has already arrived is read, up to drainMost bytes and for drainFor, so
	// that the connection can be kept.
	drainMost = 64 << 10
	drainFor  = 10 * time.Millisecond
	// continueAfter is how long the body of a client with Expect: 100-continue waits for
	// the server's 100 Continue, which HTTP/1.0 servers never send.
	continueAfter = time.Second
)

// requestBody is the body from a client, with time limits. A read takes at most limit. All reads
// together take at most limit plus a second for each rate bytes. Only reads count, so a slow server is
// not the client's fault. A requestBody is not pooled: the transport may still read after the handler
// has returned.
type requestBody struct {
	io.ReadCloser
	request *http.Request
	control *http.ResponseController
	limit   time.Duration
	rate    int64         // bytes per second; 0: only limit applies
	waited  time.Duration // total of all reads; owned by the reader
	// continued is closed once the server has sent 100 Continue, or the request is over. nil: the
	// client sends the body unasked.
	continued     chan struct{}
	wantsContinue bool        // awaitContinue has returned true; owned by the reader
	proceeds      atomic.Bool // continued is closed
	answered      atomic.Bool // the server has sent the head of its answer
	// Written by the transport's goroutine, which may still be reading.
	read, complete atomic.Bool
	bytes          atomic.Int64
	err            atomic.Pointer[error]
	// Set when the request is over: nothing more is passed on.
	late atomic.Bool
}

// newBody returns the body of a request. It makes net/http write the answer before the end of the body,
// because the server may answer early, or body and answer may both be streams.
func newBody(w http.ResponseWriter, r *http.Request, limit time.Duration, rate int64) *requestBody {
	b := &requestBody{ReadCloser: r.Body, request: r, control: http.NewResponseController(w), limit: limit, rate: rate}
	if httpguts.HeaderValuesContainsToken(r.Header["Expect"], "100-continue") {
		b.continued = make(chan struct{})
	}
	_ = b.control.EnableFullDuplex() // fails for a recorder in tests, which needs no full duplex
	b.limitNext(time.Now())          // for net/http, which reads a body that is refused unread
	return b
}

func (b *requestBody) Read(p []byte) (int, error) {
	b.read.Store(true)
	if b.late.Load() || !b.awaitContinue() {
		return 0, http.ErrBodyReadAfterClose
	}
	start := time.Now()
	b.limitNext(start)
	if b.late.Load() { // leave may have run since the first check
		b.stop()
	}
	n, err := b.ReadCloser.Read(p)
	b.waited += time.Since(start)
	b.bytes.Add(int64(n))
	switch {
	case err == io.EOF:
		b.complete.Store(true)
		// Without this, net/http's own read, which watches for the client's end, would time out.
		_ = b.control.SetReadDeadline(time.Time{})
		dropTrailers(b.request.Trailer) // trailers may include some that were not announced
	case err != nil && !b.late.Load(): // the client failed; leave did not cause the error
		b.err.Store(&err)
	}
	return n, err
}

// awaitContinue waits until the server sends 100 Continue for a client that expects it, and reports
// whether it did. As soon as the body is read, net/http sends 100 Continue to the client. If the server
// answers instead, awaitContinue waits until the answer is relayed, because a transport drops the
// answer if it cannot read the body.
func (b *requestBody) awaitContinue() bool {
	if b.continued == nil || b.wantsContinue {
		return true
	}
	timer := time.NewTimer(continueAfter)
	defer timer.Stop()
	done := b.request.Context().Done()
	select {
	case <-b.continued:
	case <-done:
	case <-timer.C:
		if b.answered.Load() {
			select {
			case <-b.continued:
			case <-done:
			}
		}
	}
	b.wantsContinue = !b.late.Load() && b.request.Context().Err() == nil
	return b.wantsContinue
}

// proceed records that the server has sent 100 Continue, or that the request is over.
func (b *requestBody) proceed() {
	if b.continued != nil && !b.proceeds.Swap(true) { // a server may send it twice
		close(b.continued)
	}
}

// limitNext sets the deadline of the next read. The deadline also applies to net/http, which reads the
// rest of a body after the handler. net/http sets its own deadline before the next request.
func (b *requestBody) limitNext(now time.Time) {
	limit := b.limit
	if b.rate > 0 {
		left := (b.limit - b.waited).Seconds() + float64(b.bytes.Load())/float64(b.rate)
		limit = time.Duration(min(left, limit.Seconds()) * float64(time.Second))
	}
	_ = b.control.SetReadDeadline(now.Add(limit))
}

// failed returns the error of reading, or nil.
func (b *requestBody) failed() error {
	if err := b.err.Load(); err != nil {
		return *err
	}
	return nil
}

// pending reports whether the client still has to send a part of the body on an HTTP/1.1 connection.
// Such a connection cannot be kept after an answer. HTTP/2 ends only the stream.
func (b *requestBody) pending() bool {
	if b.ReadCloser == nil || b.request.ProtoMajor != 1 || b.complete.Load() {
		return false
	}
	return b.request.ContentLength < 0 || b.bytes.Load() < b.request.ContentLength
}

// drain drops the body of a refused request, if the body is small and has already arrived. A client
// with Expect: 100-continue may continue without sending the body.
func (b *requestBody) drain() {
	if !b.pending() || b.read.Load() || b.request.Header["Expect"] != nil {
		return
	}
	_ = b.control.SetReadDeadline(time.Now().Add(drainFor))
	if _, err := io.CopyN(io.Discard, b.ReadCloser, drainMost); err == io.EOF {
		b.complete.Store(true)
		_ = b.control.SetReadDeadline(time.Time{})
	}
}

// leave stops passing on a body that has not ended. net/http then sends the answer, and drops the rest
// of the body for lingerFor. net/http clears the read deadline in between, so a timer sets the
// deadline. A second leave does nothing.
func (b *requestBody) leave() {
	ends := b.ReadCloser != nil && b.request.ProtoMajor > 1 && !b.complete.Load() // true: ends only the stream, not the connection
	if !ends && !b.pending() || b.late.Swap(true) {
		return
	}
	b.proceed()
	b.stop()
	if ends {
		return
	}
	if conn, known := b.request.Context().Value(connKey{}).(net.Conn); known {
		time.AfterFunc(lingerFor, func() { _ = conn.SetReadDeadline(time.Now()) })
	}
}

// stop ends a read in progress.
func (b *requestBody) stop() { _ = b.control.SetReadDeadline(time.Now()) }

// earlyWriter adds "Connection: close" to an answer that comes before the end of the body.
type earlyWriter struct {
	http.ResponseWriter
	body *requestBody
}

// WriteHeader implements http.ResponseWriter.
func (w earlyWriter) WriteHeader(code int) {
	if code >= http.StatusOK && w.body.pending() {
		w.Header().Set("Connection", "close")
	}
	w.ResponseWriter.WriteHeader(code)
}

// Unwrap is for http.ResponseController.
func (w earlyWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
