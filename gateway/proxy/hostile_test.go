package proxy

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

// hostile is a server that dies, drips, stalls, fails fast or lies, by the request's path.
func hostile(t *testing.T) string {
	// The handler goroutine of a truncated request ends when its server closes.
	return backend(t, func(w http.ResponseWriter, r *http.Request) {
		cut := func() {
			if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
				conn.Close()
			}
		}
		flush := func() { _ = http.NewResponseController(w).Flush() } // or the client is gone
		switch strings.TrimPrefix(r.URL.Path, "/") {
		case "dies":
			cut()
		case "dies-later":
			w.Header().Set("Content-Length", "1000000")
			_, _ = w.Write(make([]byte, 1000))
			flush()
			cut()
		case "fails":
			w.WriteHeader(http.StatusServiceUnavailable)
		case "drips":
			for range 20 {
				_, _ = w.Write([]byte{'.'})
				flush()
			}
		case "endless":
			for r.Context().Err() == nil {
				if _, err := w.Write(make([]byte, 64<<10)); err != nil {
					return
				}
			}
		case "stalls":
			<-r.Context().Done()
		case "echoes":
			_, _ = io.Copy(w, r.Body)
		case "lies":
			for _, lie := range []string{"TEXT request_cost.cpu=1e308,cpu_utilization=1e308,named_metrics.inflight=1e300", "JSON {\"request_cost\":{\"cpu\":-1}}", "TEXT request_cost.cpu=0,cpu_utilization=0", "\x7f"} {
				if rand.IntN(3) == 0 {
					w.Header().Set("Endpoint-Load-Metrics", lie)
				}
			}
			w.Header().Set("Trailer", "Endpoint-Load-Metrics")
			_, _ = w.Write(make([]byte, 10_000))
			w.Header().Set("Endpoint-Load-Metrics", "TEXT request_cost.disk=nan")
		}
	})
}

// Whatever clients and servers do, and whenever the policy changes, each request that was sent is
// settled once, and no request leaves anything behind.
func TestEverythingIsSettledOnce(t *testing.T) {
	seed := testkit.Seed(t)
	servers := []string{hostile(t), hostile(t), hostile(t)}
	policyOf := func(classes string, servers ...string) string {
		text := "[timeouts]\nresponse = \"100ms\"\nbody = \"100ms\"\n"
		for i, name := range strings.Fields(classes) {
			text += fmt.Sprintf("[[class]]\nname = %q\nweight = %d\nqueue = 10\nwait = \"50ms\"\nmatch = [{ path = %q }]\n", name, 1+3*i, []string{"/d", "/l", "/e"}[i])
		}
		for i, url := range servers {
			text += fmt.Sprintf("[[server]]\nurl = %q\ncpu = %d\ndisk = 10\n", url, 1+i)
		}
		return text + "[[cost]]\npath = \"/drips\"\ncpu = 0.1\ndisk = 0.01\n"
	}
	policies := []string{
		policyOf("gold silver bronze", servers...),
		policyOf("bronze gold", servers[:2]...),
		policyOf("silver", servers[1:]...),
	}
	for _, scheduler := range []string{"mqos", "single:disk", "none"} {
		t.Run(scheduler, func(t *testing.T) {
			g := serve(t, policies[0], func(c *Config) { c.Scheduler = scheduler })
			transport := &http.Transport{MaxIdleConnsPerHost: 4}
			defer transport.CloseIdleConnections()
			client := &http.Client{Transport: transport}
			var clients sync.WaitGroup
			for c := range 16 {
				rng := rand.New(rand.NewPCG(seed, uint64(c)))
				clients.Go(func() {
					for range 12 {
						visit(t.Context(), client, "http://"+g.at, rng)
					}
				})
			}
			rng := rand.New(rand.NewPCG(seed, 99))
			done := make(chan struct{})
			go func() { clients.Wait(); close(done) }()
			changes := time.NewTicker(20 * time.Millisecond)
			defer changes.Stop()
			for going, n := true, 0; going; {
				select {
				case <-changes.C:
					if n++; n == 10 { // leaks that a policy change might hide are found after the change
						changes.Stop()
					}
					testkit.NoError(t, g.SetPolicy(parse(t, policies[rng.IntN(len(policies))])))
				case <-done:
					going = false
				}
			}
			g.idle(t)
			for _, s := range g.Status().Servers {
				testkit.Equal(t, s.Sent, s.Departed+s.Failed+s.Aborted, "of requests sent to %s %d were answered, %d failed and %d were aborted", s.URL, s.Departed, s.Failed, s.Aborted)
			}
		})
	}
}

// visit sends a request, and perhaps disconnects in the middle of the request.
func visit(ctx context.Context, client *http.Client, at string, rng *rand.Rand) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if rng.IntN(2) == 0 { // the client has limited patience
		ctx, cancel = context.WithTimeout(ctx, time.Duration(rng.IntN(20_000))*time.Microsecond)
		defer cancel()
	}
	// Five failures in a row eject a server, so most requests are answered.
	paths := []string{"dies", "dies-later", "fails", "stalls", "drips", "endless", "echoes", "lies"}
	path := paths[rng.IntN(4)+4*min(1, rng.IntN(5))]
	var body io.Reader
	if path == "echoes" {
		body = &unsteady{Reader: strings.NewReader(strings.Repeat("x", rng.IntN(100_000))), breaks: rng.IntN(4)}
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, at+"/"+path, body)
	if err != nil {
		panic(err)
	}
	res, err := client.Do(r)
	if err != nil {
		return // the server may cut the body
	}
	if path == "endless" {
		_, _ = io.CopyN(io.Discard, res.Body, rng.Int64N(1<<20))
	} else if rng.IntN(3) > 0 {
		_, _ = io.Copy(io.Discard, res.Body)
	}
	res.Body.Close()
}

// unsteady breaks off after some reads; 0: never.
type unsteady struct {
	io.Reader
	breaks int
}

func (u *unsteady) Read(p []byte) (int, error) {
	if u.breaks > 0 {
		if u.breaks--; u.breaks == 0 {
			return 0, io.ErrUnexpectedEOF
		}
	}
	return u.Reader.Read(p[:min(len(p), 8<<10)])
}
