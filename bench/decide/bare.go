package decide

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"runtime"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/rawfd"
)

// BareCommand is the argument that makes the benchmark program a bare server.
const BareCommand = "bare"

// Bare starts this program as a bare server in a separate process.
func Bare(kind string, more ...string) (*Server, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	ports, err := local.Ports(1)
	if err != nil {
		return nil, err
	}
	p, err := local.Run(self, "", append([]string{BareCommand, kind, ports[0]}, more...), local.Accepts(ports[0]))
	return &Server{Process: p, Name: "bare " + kind, At: ports[0], Bare: true}, err
}

// Serve serves until the process is killed. The arguments are the same as of Bare: kind, address,
// and the arguments of the kind.
func Serve(args []string) error {
	if len(args) < 2 {
		return errors.New("want a kind of server and host:port")
	}
	kind, at, more := args[0], args[1], args[2:]
	if kind == "udp" {
		return echo(at)
	}
	if kinds[kind] == nil {
		return fmt.Errorf("no server %q", kind)
	}
	handler, err := kinds[kind](more)
	if err != nil {
		return err
	}
	ln, err := net.Listen("tcp", at)
	if err != nil {
		return err
	}
	return lifecycle.Serve(ln, &http.Server{Handler: handler})(context.Background())
}

// echo is the floor of decisions over UDP: it reads and answers datagrams with the system calls that admission makes, and
// decides nothing.
func echo(at string) error {
	conn, err := rawfd.ListenUDP(at, 32, 512)
	if err != nil {
		return err
	}
	defer conn.Close()
	ready, err := net.Listen("tcp", at) // signals to Bare that the floor is ready
	if err != nil {
		return err
	}
	defer ready.Close()
	for {
		n, err := conn.Receive(clock.Mono())
		if errors.Is(err, net.ErrClosed) {
			return err
		}
		for i := range n {
			conn.Queue(conn.Datagram(i))
		}
		conn.Flush()
	}
}

// Service is the mean processor time of a request in a backend.
const Service = 20 * time.Millisecond

// kinds creates the handlers of bare HTTP servers: "http" answers TRUE, "backend" simulates
// processors with timers (0: without delay), "proxy" and "forwarder" are reverse proxies.
// The kind "udp" is handled separately.
var kinds = map[string]func(more []string) (http.Handler, error){
	"http": func([]string) (http.Handler, error) {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/plain; charset=utf-8")
			_, _ = io.WriteString(w, "TRUE")
		}), nil
	},
	"backend": backend,
	"proxy": func(to []string) (http.Handler, error) {
		return bareProxy(to[0], func(*httputil.ProxyRequest) {}, 0)
	},
	"forwarder": func(to []string) (http.Handler, error) {
		return bareProxy(to[0], (*httputil.ProxyRequest).SetXForwarded, time.Minute)
	},
}

func backend(processors []string) (http.Handler, error) {
	n, err := strconv.Atoi(processors[0])
	if err != nil {
		return nil, err
	}
	free := make(chan struct{}, max(n, 1))
	var served atomic.Int64
	const variation = 0.46 // as in tools/sim/web
	sigma := math.Sqrt(math.Log(1 + variation*variation))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/metrics" {
			fmt.Fprintln(w, "served", served.Load())
			return
		}
		served.Add(1)
		if n > 0 {
			free <- struct{}{}
			time.Sleep(time.Duration(float64(Service) * math.Exp(sigma*rand.NormFloat64()-sigma*sigma/2)))
			<-free
		}
		_, _ = io.WriteString(w, "TRUE")
	}), nil
}

// Mallocs is the metric of a bare proxy's allocations, named like the Go metric.
const Mallocs = "go_memstats_mallocs_total"

// bareProxy is the reference for the gateway's overhead: httputil.ReverseProxy with a large
// connection pool, the function more, and a timeout for response headers.
func bareProxy(to string, more func(*httputil.ProxyRequest), bound time.Duration) (http.Handler, error) {
	target, err := url.Parse("http://" + to)
	if err != nil {
		return nil, err
	}
	proxy := &httputil.ReverseProxy{
		Rewrite:   func(r *httputil.ProxyRequest) { r.SetURL(target); more(r) },
		Transport: &http.Transport{MaxIdleConnsPerHost: 256, DisableCompression: true, ResponseHeaderTimeout: bound},
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/metrics" {
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			fmt.Fprintln(w, Mallocs, m.Mallocs)
			return
		}
		proxy.ServeHTTP(w, r)
	}), nil
}
