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
	// lingerFor is how long the rest of a body is read and dropped after an early answer. A
	// connection that is closed while its client still sends may lose the answer.
	lingerFor = time.Second
	// What has come of a body that nobody wants is read, up to drainMost bytes and for
	// drainFor, so that the connection can be kept.
	drainMost = 64 << 10
	drainFor  = 10 * time.Millisecond
	// continueAfter is how long the body of a client that asked first (Expect: 100-continue)
	// waits for the server's word. Servers of HTTP/1.0 never say it.
	continueAfter = time.Second
)

// requestBody is what a client sends, in time: a read takes at most limit, and all
// together at most that and a second for each rate bytes. Only reads count, so a server
// that takes its time is not the client's fault. It is not pooled: the transport may
// still read when the handler has returned.
type requestBody struct {
	io.ReadCloser
	of      *http.Request
	control *http.ResponseController
	limit   time.Duration
	rate    int64         // bytes a second; 0: only limit holds
	waited  time.Duration // in all reads; owned by the reader
	// continued is closed once the server has asked for the body, or the request is over. It is
	// nil if the client sends the body unasked.
	continued chan struct{}
	wanted    bool        // awaitContinue has returned true; owned by the reader
	proceeds  atomic.Bool // continued is closed
	answered  atomic.Bool // the server has sent the head of its answer
	// Written by the transport's goroutine, which may still be at it.
	read, ended atomic.Bool
	bytes       atomic.Int64
	err         atomic.Pointer[error]
	// Written when the request is over: nothing more is passed on.
	over atomic.Bool
}

// newBody returns the body of a request, and has net/http write the answer before it has
// read the body to its end: the server may answer early, or both may be streams.
func newBody(w http.ResponseWriter, r *http.Request, limit time.Duration, rate int64) *requestBody {
	b := &requestBody{ReadCloser: r.Body, of: r, control: http.NewResponseController(w), limit: limit, rate: rate}
	if httpguts.HeaderValuesContainsToken(r.Header["Expect"], "100-continue") {
		b.continued = make(chan struct{})
	}
	_ = b.control.EnableFullDuplex() // a recorder, in tests, needs none
	b.limitNext(time.Now())          // what is refused unread, net/http reads
	return b
}

func (b *requestBody) Read(p []byte) (int, error) {
	b.read.Store(true)
	if b.over.Load() || !b.awaitContinue() {
		return 0, http.ErrBodyReadAfterClose
	}
	began := time.Now()
	b.limitNext(began)
	if b.over.Load() { // meanwhile
		b.stop()
	}
	n, err := b.ReadCloser.Read(p)
	b.waited += time.Since(began)
	b.bytes.Add(int64(n))
	switch {
	case err == io.EOF:
		b.ended.Store(true)
		// Or the server's own read, which looks for the client's end, would time out.
		_ = b.control.SetReadDeadline(time.Time{})
		dropTrailers(b.of.Trailer) // with them came also some that were not announced
	case err != nil && !b.over.Load(): // the client's failure, not leave's doing
		b.err.Store(&err)
	}
	return n, err
}

// awaitContinue waits until the server wants the body of a client that asked first, and reports
// whether it does: net/http tells the client to send the body as soon as the body is read. If the
// server answers instead, awaitContinue waits until the answer is relayed, since a transport gives
// up the answer when it cannot read the body.
func (b *requestBody) awaitContinue() bool {
	if b.continued == nil || b.wanted {
		return true
	}
	timer := time.NewTimer(continueAfter)
	defer timer.Stop()
	gone := b.of.Context().Done()
	select {
	case <-b.continued:
	case <-gone:
	case <-timer.C:
		if b.answered.Load() {
			select {
			case <-b.continued:
			case <-gone:
			}
		}
	}
	b.wanted = !b.over.Load() && b.of.Context().Err() == nil
	return b.wanted
}

// proceed notes that the server has asked for the body, or that the request is over.
func (b *requestBody) proceed() {
	if b.continued != nil && !b.proceeds.Swap(true) { // a server may ask twice
		close(b.continued)
	}
}

// limitNext bounds the next read, also that of net/http, which reads what a handler
// has left. The server sets its own bound before the next request.
func (b *requestBody) limitNext(now time.Time) {
	limit := b.limit
	if b.rate > 0 {
		left := (b.limit - b.waited).Seconds() + float64(b.bytes.Load())/float64(b.rate)
		limit = time.Duration(min(left, limit.Seconds()) * float64(time.Second))
	}
	_ = b.control.SetReadDeadline(now.Add(limit))
}

// failed returns why reading failed, nil if it has not.
func (b *requestBody) failed() error {
	if err := b.err.Load(); err != nil {
		return *err
	}
	return nil
}

// pending reports whether the client has yet to send of the body on a connection of
// HTTP/1.1, which cannot be kept if it is answered now. HTTP/2 ends the stream alone.
func (b *requestBody) pending() bool {
	if b.ReadCloser == nil || b.of.ProtoMajor != 1 || b.ended.Load() {
		return false
	}
	return b.of.ContentLength < 0 || b.bytes.Load() < b.of.ContentLength
}

// drain drops the body of a request that is refused, if it is small and has come already.
// A client that asked first whether to send it may go on without it.
func (b *requestBody) drain() {
	if !b.pending() || b.read.Load() || b.of.Header["Expect"] != nil {
		return
	}
	_ = b.control.SetReadDeadline(time.Now().Add(drainFor))
	if _, err := io.CopyN(io.Discard, b.ReadCloser, drainMost); err == io.EOF {
		b.ended.Store(true)
		_ = b.control.SetReadDeadline(time.Time{})
	}
}

// leave ends the passing on of a body that has not come to its end. net/http then sends
// the answer, and drops what comes of the body, for lingerFor: it lifts the deadline of
// reads in between, so a timer sets that. A second leave does nothing.
func (b *requestBody) leave() {
	ends := b.ReadCloser != nil && b.of.ProtoMajor > 1 && !b.ended.Load() // the stream, not its connection
	if !ends && !b.pending() || b.over.Swap(true) {
		return
	}
	b.proceed()
	b.stop()
	if ends {
		return
	}
	if conn, known := b.of.Context().Value(connKey{}).(net.Conn); known {
		time.AfterFunc(lingerFor, func() { _ = conn.SetReadDeadline(time.Now()) })
	}
}

// stop ends a read that is under way.
func (b *requestBody) stop() { _ = b.control.SetReadDeadline(time.Now()) }

// earlyWriter says in an answer that comes before the body has ended that the connection
// will not be kept.
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
