package gateway

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

// resource is a virtual resource: it works off units at its speed, one request after the other.
type resource struct {
	speed float64 // units a second

	mu   sync.Mutex
	free time.Time // when the given work is done
	used float64   // units
}

// work gives the resource units of work, and waits until they are done. A resource makes up for late
// timers, because its times are planned.
func (r *resource) work(ctx context.Context, units float64) {
	r.mu.Lock()
	now := time.Now()
	if r.free.Before(now.Add(-50 * time.Millisecond)) {
		r.free = now
	}
	r.free = r.free.Add(time.Duration(units / r.speed * float64(time.Second)))
	r.used += units
	until := r.free
	r.mu.Unlock()
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// backend is a web server whose pages use virtual resources.
type backend struct {
	*httptest.Server
	resources map[string]*resource
}

func newBackend(t testing.TB, speeds map[string]float64) *backend {
	b := &backend{resources: map[string]*resource{}}
	for name, speed := range speeds {
		b.resources[name] = &resource{speed: speed}
	}
	b.Server = httptest.NewServer(b)
	t.Cleanup(b.Close)
	return b
}

// pages gives the cost of a request to a path, by resource.
var pages = map[string]map[string]float64{
	"/search":   {"cpu": 12, "disk": 4, "net": 2},
	"/archive":  {"cpu": 2, "disk": 12, "net": 4},
	"/download": {"cpu": 2, "disk": 4, "net": 12},
}

func (b *backend) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	for _, name := range []string{"cpu", "disk", "net"} {
		if units := pages[r.URL.Path][name]; units > 0 {
			b.resources[name].work(r.Context(), units)
		}
	}
	fmt.Fprintln(w, r.URL.Path)
}

// newClient returns a client for many simultaneous requests.
func newClient(t testing.TB) *http.Client {
	transport := &http.Transport{MaxIdleConnsPerHost: 256}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: testkit.Hang}
}
