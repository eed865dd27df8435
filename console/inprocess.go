package console

import (
	"bytes"
	"io"
	"net/http"
)

// InProcess sends requests to a handler of this process, like a local program without a
// proxy. It suits short answers.
func InProcess(h http.Handler) http.RoundTripper { return inProcess{h} }

type inProcess struct{ handler http.Handler }

func (p inProcess) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.RemoteAddr, r.RequestURI, r.Host = "127.0.0.1:0", r.URL.RequestURI(), "localhost"
	if r.Body == nil {
		r.Body = http.NoBody
	}
	w := &recorded{header: http.Header{}, status: http.StatusOK}
	p.handler.ServeHTTP(w, r)
	return &http.Response{
		Status: http.StatusText(w.status), StatusCode: w.status, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: w.header, Body: io.NopCloser(&w.body), ContentLength: int64(w.body.Len()), Request: r,
	}, nil
}

// recorded is a stored answer.
type recorded struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func (w *recorded) Header() http.Header         { return w.header }
func (w *recorded) WriteHeader(status int)      { w.status = status }
func (w *recorded) Write(p []byte) (int, error) { return w.body.Write(p) }
