package proxy

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// The gateway passes on each byte of a dripping server as it comes. The request holds one place and is
// paid for once, also if the client gives up.
func TestDrippingServer(t *testing.T) {
	next, gone := make(chan struct{}), make(chan struct{}, 1)
	url := backend(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/drips" {
			return
		}
		for range 20 {
			_, _ = io.WriteString(w, ".")
			_ = http.NewResponseController(w).Flush()
			select {
			case <-next:
			case <-r.Context().Done():
				gone <- struct{}{}
				return
			}
		}
	})
	g := serve(t, several(url), nil)
	for _, bytes := range []int{20, 7} { // all bytes; fewer
		c, r := g.dial(t)
		write(t, c, "GET /drips HTTP/1.1\r\nHost: a\r\n\r\n")
		res, err := http.ReadResponse(r, nil)
		testkit.Must(t, err)
		for i := range bytes {
			if i > 0 {
				next <- struct{}{}
			}
			if _, err := io.ReadFull(res.Body, make([]byte, 1)); err != nil {
				t.Fatalf("byte %d: %v", i, err)
			}
		}
		if s := g.Status(); s.Servers[0].InFlight != 1 || s.Servers[0].Free["cpu"] != 90 {
			t.Errorf("while it drips: %+v", s.Servers[0])
		}
		if other, _ := g.get(t, "/"); other.StatusCode != http.StatusOK {
			t.Error(other.Status)
		}
		if bytes == 20 {
			next <- struct{}{}
			if rest, err := io.ReadAll(res.Body); err != nil || strings.Trim(string(rest), ".") != "" {
				t.Errorf("%q, %v", rest, err)
			}
		} else {
			c.Close()
			<-gone
		}
		g.idle(t)
	}
	if s := g.Status().Servers[0]; s.Departed != 3 || s.Aborted != 1 || s.Failed != 0 {
		t.Errorf("%+v", s)
	}
}
