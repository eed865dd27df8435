package proxy

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/internal/testkit"
)

// Clients that connect and send nothing get as many connections as the bound allows. The gateway serves
// the open connections, and each closed connection frees its slot.
func TestIdleConnectionsAreBounded(t *testing.T) {
	const most, more = 200, 100
	url := backend(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "yes") })
	var registry *prometheus.Registry
	g := serve(t, several(url), func(c *Config) {
		registry = prometheus.NewRegistry()
		c.Metrics, c.MaxConnections = registry, most
	})
	value := func(name string) float64 { return testkit.Metric(t, registry, name) }
	var idle []net.Conn
	var readers []*bufio.Reader
	for range most {
		c, r := g.dial(t)
		idle, readers = append(idle, c), append(readers, r)
	}
	testkit.WaitFor(t, "all slots are taken", func() bool { return value("srtm_gateway_connections") == most })
	explained := 0
	for range more {
		c, r := g.dial(t)
		testkit.Must(t, c.SetReadDeadline(time.Now().Add(testkit.Hang)))
		res, err := http.ReadResponse(r, nil)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			t.Fatal("one connection more than there may be stays open")
		case err == nil && res.StatusCode != http.StatusServiceUnavailable:
			t.Fatal(res.Status)
		case err == nil:
			explained++ // unless the gateway could not answer for as long as it tries
		}
	}
	if explained == 0 {
		t.Error("no refusal has a reason")
	}
	if open, refused := value("srtm_gateway_connections"), value("srtm_gateway_connections_refused_total"); open != most || refused != more {
		t.Errorf("%v open and %v refused, want %d and %d", open, refused, most, more)
	}
	write(t, idle[0], "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
	if res, body := answer(t, readers[0]); res.StatusCode != http.StatusOK || body != "yes" {
		t.Errorf("of a connection that is there: %d %q", res.StatusCode, body)
	}
	for _, c := range idle[1:] {
		_ = c.Close()
	}
	testkit.WaitFor(t, "slots are given back", func() bool { return value("srtm_gateway_connections") == 1 })
	if res, _ := g.get(t, "/"); res.StatusCode != http.StatusOK {
		t.Error(res.Status)
	}
}
