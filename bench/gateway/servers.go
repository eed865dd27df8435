package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
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
	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/local"
)

// service is the mean time of a processor that a request takes of an unequal server.
const service = 20 * time.Millisecond

// self runs this program as a server of its own process, see serve.
func self(kind string, args ...string) (*decide.Server, error) {
	path, err := os.Executable()
	if err != nil {
		return nil, err
	}
	ports, err := local.Ports(1)
	if err != nil {
		return nil, err
	}
	p, err := local.Run(path, "", append([]string{"bare-" + kind, ports[0]}, args...), local.Accepts(ports[0]))
	return &decide.Server{Process: p, Name: kind, At: ports[0]}, err
}

// serve is a server, if the arguments are self's: a backend with so many virtual
// processors (timers; 0: it answers at once), or a reverse proxy before one.
func serve(args []string) error {
	if len(args) != 4 || !strings.HasPrefix(args[1], "bare-") {
		return nil
	}
	ln, err := net.Listen("tcp", args[2])
	if err != nil {
		return err
	}
	var handler http.Handler
	switch args[1] {
	case "bare-proxy":
		handler, err = bareProxy(args[3], func(*httputil.ProxyRequest) {}, 0)
	case "bare-forwarder":
		handler, err = bareProxy(args[3], (*httputil.ProxyRequest).SetXForwarded, time.Minute)
	default:
		handler, err = backend(args[3])
	}
	if err != nil {
		return err
	}
	return lifecycle.Serve(ln, &http.Server{Handler: handler})(context.Background())
}

func backend(processors string) (http.Handler, error) {
	n, err := strconv.Atoi(processors)
	if err != nil {
		return nil, err
	}
	free := make(chan struct{}, max(n, 1))
	var served atomic.Int64
	const variation = 0.46 // as tools/sim/web
	sigma := math.Sqrt(math.Log(1 + variation*variation))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/served" {
			fmt.Fprint(w, served.Load())
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
func served(backends []*decide.Server) []float64 {
	counts := make([]float64, len(backends))
	for i, b := range backends {
		counts[i], _ = number("http://"+b.At+"/served", "")
	}
	return counts
}

var asking = &http.Client{Timeout: 5 * time.Second}

// number reads the number that follows a name in what is at a URL.
func number(at, name string) (n float64, err error) {
	resp, err := asking.Get(at)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(text), name)
	_, err = fmt.Sscan(rest, &n)
	return n, err
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
		if r.URL.Path == "/mallocs" {
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			fmt.Fprint(w, m.Mallocs)
			return
		}
		proxy.ServeHTTP(w, r)
	}), nil
}

// proxies starts all that is compared before the backends: where bare ones are wanted,
// two of them, then the gateway and the others.
func proxies(bin, dir string, backends []string, bare bool) (all []*subject, errs []error) {
	add := func(name string, s *decide.Server, err error, mallocs func() (float64, error)) {
		all, errs = append(all, &subject{name: name, Server: s, mallocs: mallocs}), append(errs, err)
	}
	if bare {
		for _, kind := range []string{"proxy", "forwarder"} {
			s, err := self(kind, backends[0])
			name := map[string]string{"proxy": "bare ReverseProxy", "forwarder": "the same with X-Forwarded-* and a bound on the answer, as ours"}[kind]
			add(name, s, err, func() (float64, error) { return number("http://"+s.At+"/mallocs", "") })
		}
	}
	gateway := func(name string, flags ...string) {
		s, admin, err := startGateway(bin, dir, backends, flags)
		add(name, s, err, func() (float64, error) { return number(admin+"/metrics", "\ngo_memstats_mallocs_total ") })
	}
	gateway("gateway")
	if !bare {
		gateway("gateway, --balance=busy", "--balance=busy")
	}
	each := func(form string) string {
		var lines strings.Builder
		for i, at := range backends {
			fmt.Fprintf(&lines, form, at, i)
		}
		return lines.String()
	}
	s, err := decide.Installed("haproxy", dir, `global
 nbthread 1
defaults
 mode http
 timeout connect 5s
 timeout client 60s
 timeout server 60s
 http-reuse always
frontend f
 bind {at}
 default_backend b
backend b
 balance leastconn
{more}`, each(" server s%[2]d %[1]s\n"), func(file string) []string { return []string{"-db", "-f", file} })
	add("HAProxy, leastconn", s, err, nil)
	s, err = decide.Installed("nginx", dir, `daemon off; pid {dir}/pid; error_log stderr warn; worker_processes 1; events {}
http { access_log off; client_body_temp_path {dir}/b; proxy_temp_path {dir}/p; fastcgi_temp_path {dir}/f; uwsgi_temp_path {dir}/u; scgi_temp_path {dir}/s;
keepalive_requests 10000000; upstream b { least_conn; {more} keepalive 256; }
server { listen {at}; location / { proxy_pass http://b; proxy_http_version 1.1; proxy_set_header Connection ""; } } }
`, each("server %[1]s; "), func(file string) []string { return []string{"-p", dir, "-c", file} })
	add("nginx, least_conn", s, err, nil)
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
{more}ProxySet lbmethod=bybusyness
</Proxy>
ProxyPass / balancer://b/
`, each("BalancerMember http://%[1]s\n"), func(file string) []string { return []string{"-f", file, "-DFOREGROUND"} })
	add("Apache, bybusyness", s, err, nil)
	return all, errs
}

// startGateway runs the daemon. Its classes and costs are what it has without any.
func startGateway(bin, dir string, backends, flags []string) (s *decide.Server, admin string, err error) {
	ports, err := local.Ports(2)
	if err != nil {
		return nil, "", err
	}
	var text strings.Builder
	for _, at := range backends {
		fmt.Fprintf(&text, "[[server]]\nurl = \"http://%s\"\n", at)
	}
	file := filepath.Join(dir, "policy.toml")
	if err := os.WriteFile(file, []byte(text.String()), 0o600); err != nil {
		return nil, "", err
	}
	p, err := local.Run(filepath.Join(bin, "gateway"), dir, append([]string{"--policy", file, "--http-address", ports[0], "--admin-address", ports[1], "--log-level=error"}, flags...),
		local.Answers("http://"+ports[1]+"/healthz"))
	return &decide.Server{Process: p, Name: "gateway", At: ports[0]}, "http://" + ports[1], err
}
