package proxy

import (
	"net/http"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// Streams do not use up the requests that a server may have in flight.
func TestStreamsMakeRoom(t *testing.T) {
	release := make(chan struct{})
	defer close(release)
	url := backend(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/events" {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = w.Write([]byte("data: 1\n\n"))
			testkit.NoError(t, http.NewResponseController(w).Flush())
			select {
			case <-release:
			case <-r.Context().Done():
			}
		}
	})
	g := serve(t, "[[server]]\nurl = \""+url+"\"", nil)
	for range 50 {
		c, r := g.dial(t)
		write(t, c, "GET /events HTTP/1.1\r\nHost: a\r\n\r\n")
		if _, err := r.Peek(1); err != nil {
			t.Fatal(err)
		}
	}
	if res, _ := g.get(t, "/"); res.StatusCode != http.StatusOK {
		t.Errorf("beside 50 streams: %s", res.Status)
	}
}
