package proxy

import (
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

// A server that refuses immediately, with any status, gets no more than an even part of the requests.
func TestServerThatRefusesFastGetsNoMoreThanAnEvenPart(t *testing.T) {
	for name, refuse := range map[string]http.HandlerFunc{
		"401": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) },
		"404": http.NotFound,
		"429": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTooManyRequests) },
		"grpc-status 14": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/grpc")
			w.Header().Set("Grpc-Status", "14")
		},
		"grpc-status 14 in a trailer": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/grpc")
			w.Header().Set("Trailer", "Grpc-Status")
			_, _ = w.Write([]byte("x"))
			w.Header().Set("Grpc-Status", "14")
		},
		"grpc-status 7": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/grpc")
			w.Header().Set("Grpc-Status", "7")
		},
	} {
		t.Run(name, func(t *testing.T) {
			var got [3]atomic.Int64
			count := func(i int, h http.HandlerFunc) string {
				place := make(chan struct{}, 1)
				return backend(t, func(w http.ResponseWriter, r *http.Request) {
					got[i].Add(1)
					if i != 0 {
						place <- struct{}{}
						<-time.After(5 * time.Millisecond) // the service time of the single worker
						<-place
					}
					h(w, r)
				})
			}
			well := func(http.ResponseWriter, *http.Request) {}
			g := serve(t, "[[class]]\nname = \"c\"\nwait = \"1h\"\n"+several(count(0, refuse), count(1, well), count(2, well)), nil)
			var clients sync.WaitGroup
			for range 12 {
				clients.Go(func() {
					for range 50 {
						g.get(t, "/")
					}
				})
			}
			clients.Wait()
			all := got[0].Load() + got[1].Load() + got[2].Load()
			if n := got[0].Load(); n > all*4/10 {
				t.Errorf("it got %d of %d", n, all)
			}
			testkit.Equal(t, all, 600, "requests")
			if s := fmt.Sprintf("%+v", g.Status().Servers[0]); name == "grpc-status 14" && g.Status().Servers[0].Failed == 0 {
				t.Errorf("no failure: %s", s)
			}
			g.idle(t)
		})
	}
}
