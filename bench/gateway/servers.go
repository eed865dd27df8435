package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/bench/decide"
	"github.com/srtm-io/srtm/bench/host"
	"github.com/srtm-io/srtm/internal/local"
)

// service is the mean time of a processor that a request takes of an unequal server.
const service = 20 * time.Millisecond

// kinds are what this program itself is besides: a backend with so many virtual processors
// (timers; 0: it answers at once), and reverse proxies before one.
var kinds = map[string]decide.Kind{
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
	const variation = 0.46 // as tools/sim/web
	sigma := math.Sqrt(math.Log(1 + variation*variation))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/metrics" {
			fmt.Fprintln(w, "served", served.Load())
			return
		}
		served.Add(1)
		if n > 0 {
			free <- struct{}{}
			time.Sleep(time.Duration(float64(service) * math.Exp(sigma*rand.NormFloat64()-sigma*sigma/2)))
			<-free
		}
		_, _ = io.WriteString(w, "TRUE")
	}), nil
}

// served is what each backend has had.
func served(ctx context.Context, backends []*decide.Server) []float64 {
	counts := make([]float64, len(backends))
	for i, b := range backends {
		all, _ := host.Metrics(ctx, b.At)
		counts[i] = all["served"]
	}
	return counts
}

// bareProxy is what the gateway's overhead is measured by: httputil.ReverseProxy with
// connections to spare, and nothing else but more and a bound on an answer's header.
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
			fmt.Fprintln(w, mallocs, m.Mallocs)
			return
		}
		proxy.ServeHTTP(w, r)
	}), nil
}

// proxies starts all that is compared before the backends: where bare ones are wanted,
// two of them, then the gateway and the others.
func proxies(bin, dir string, backends []*decide.Server, bare bool) (all []*subject) {
	add := func(name string, s *decide.Server, err error, metrics string) {
		all = append(all, &subject{name, s, err, metrics})
	}
	if bare {
		for _, b := range []struct{ kind, name string }{
			{"proxy", "bare ReverseProxy"}, {"forwarder", "the same with X-Forwarded-* and a bound on the answer, as ours"},
		} {
			s, err := decide.Bare(b.kind, backends[0].At)
			at := ""
			if err == nil {
				at = s.At
			}
			add(b.name, s, err, at)
		}
	}
	each := func(form string) string {
		var lines strings.Builder
		for i, b := range backends {
			fmt.Fprintf(&lines, form, b.At, i)
		}
		return lines.String()
	}
	gateway := func(name string, flags ...string) {
		s, admin, err := startGateway(bin, dir, each("[[server]]\nurl = \"http://%[1]s\"\n"), flags)
		add(name, s, err, admin)
	}
	gateway("gateway")
	if !bare {
		gateway("gateway, --balance=busy", "--balance=busy")
	}
	s, err := decide.HAProxy(dir, " default_backend b\nbackend b\n http-reuse always\n balance leastconn\n"+each(" server s%[2]d %[1]s\n"))
	add("HAProxy, leastconn", s, err, "")
	s, err = decide.Nginx(dir, "upstream b { least_conn; "+each("server %[1]s; ")+`keepalive 256; }
server { listen {at}; location / { proxy_pass http://b; proxy_http_version 1.1; proxy_set_header Connection ""; } }`)
	add("nginx, least_conn", s, err, "")
	var modules strings.Builder
	for _, m := range []string{"mpm_event", "authz_core", "proxy", "proxy_http", "proxy_balancer", "lbmethod_bybusyness", "slotmem_shm"} {
		fmt.Fprintf(&modules, "LoadModule %s_module /usr/lib/apache2/modules/mod_%s.so\n", m, m)
	}
	s, err = decide.Installed("apache2", dir, modules.String()+`ServerName x
Listen {at}
ServerRoot {dir}
DefaultRuntimeDir {dir}
PidFile {dir}/apache.pid
ErrorLog {dir}/apache.log
LogLevel crit
User nobody
Group nogroup
MaxKeepAliveRequests 0
ThreadsPerChild 64
MaxRequestWorkers 320
ServerLimit 5
<Proxy balancer://b>
`+each("BalancerMember http://%[1]s\n")+`ProxySet lbmethod=bybusyness
</Proxy>
ProxyPass / balancer://b/
`, "-f", "{file}", "-DFOREGROUND")
	add("Apache, bybusyness", s, err, "")
	return all
}

// stop stops those that have started.
func stop(all []*subject) {
	for _, s := range all {
		decide.Stop(s.Server)
	}
}

// startGateway runs the daemon. Its classes and costs are what it has without any.
func startGateway(bin, dir, policy string, flags []string) (s *decide.Server, admin string, err error) {
	ports, err := local.Ports(2)
	if err != nil {
		return nil, "", err
	}
	file := filepath.Join(dir, "policy.toml")
	if err := os.WriteFile(file, []byte(policy), 0o600); err != nil {
		return nil, "", err
	}
	p, err := local.Run(filepath.Join(bin, "gateway"), dir, append([]string{"--policy", file, "--http-address", ports[0], "--admin-address", ports[1], "--log-level=error"}, flags...),
		local.Answers("http://"+ports[1]+"/healthz"))
	return &decide.Server{Process: p, Name: "gateway", At: ports[0]}, ports[1], err
}
