package lookup

import (
	"crypto/tls"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// Clients that request much and do not read cost no more than the bound. A client that reads still
// gets its answer.
func TestWhoDoesNotReadIsCutShort(t *testing.T) {
	const size, fitting, requests = 8 << 20, 3, 12 // larger than sockets hold
	for _, version := range []int{1, 2} {
		a := newAnswers(nil)
		a.maxBytes = fitting*size + fitting*2 // a JSON string has quotes
		s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			a.listing(w, r, func() any { return make([]byte, size/4*3) }) // in base64
		}))
		s.EnableHTTP2 = version == 2
		s.StartTLS()
		client := s.Client()
		if version == 1 {
			client.Transport = &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"http/1.1"}}}
		}
		var unread []*http.Response
		get := func() *http.Response {
			r := testkit.Result(client.Get(s.URL)).Must(t)
			testkit.Equal(t, r.ProtoMajor, version, "HTTP version")
			return r
		}
		for range requests {
			unread = append(unread, get())
		}
		open := func() (bytes, n int) {
			a.mu.Lock()
			defer a.mu.Unlock()
			for range a.mu.oldestFirst.All() {
				n++
			}
			return a.mu.bytes, n
		}
		if bytes, n := open(); n != fitting || bytes > a.maxBytes {
			t.Errorf("HTTP/%d: %d answers of %d bytes are being written, want %d", version, n, bytes, fitting)
		}
		testkit.Equal(t, a.cut.Load(), requests-fitting, "answers cut short")
		r := get()
		if n, err := io.Copy(io.Discard, r.Body); err != nil || n < size {
			t.Errorf("HTTP/%d: who reads has %d bytes, %v", version, n, err)
		}
		if _, err := io.Copy(io.Discard, unread[0].Body); err == nil {
			t.Errorf("HTTP/%d: the oldest was not cut short", version)
		}
		for _, r := range unread {
			testkit.Must(t, r.Body.Close())
		}
		client.CloseIdleConnections()
		s.Close()
		testkit.WaitFor(t, "all answers are over", func() bool { bytes, n := open(); return bytes == 0 && n == 0 })
	}
}
