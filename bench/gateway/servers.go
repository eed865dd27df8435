package gateway

import (
	"context"
	"fmt"
	"strings"

	"github.com/srtm-io/srtm/bench/decide"
	"github.com/srtm-io/srtm/bench/host"
)

// served returns the number of requests that each backend has served.
func served(ctx context.Context, backends []*decide.Server) []float64 {
	counts := make([]float64, len(backends))
	for i, b := range backends {
		all, _ := host.Metrics(ctx, b.At)
		counts[i] = all["served"]
	}
	return counts
}

// proxies starts the proxies for the backends: with beside, first two bare proxies, then
// the gateway and the others.
func proxies(bin, dir string, backends []*decide.Server, beside bool) (all []*subject) {
	add := func(name string, s *decide.Server, err error, metrics string) {
		all = append(all, &subject{name, s, err, metrics})
	}
	if beside {
		for _, b := range []struct{ kind, name string }{
			{"proxy", bare}, {"forwarder", "the same with X-Forwarded-* and a bound on the answer, as ours"},
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
		s, admin, err := decide.Gateway(bin, dir, each("[[server]]\nurl = \"http://%[1]s\"\n"), flags...)
		add(name, s, err, admin)
	}
	gateway(ours)
	if !beside {
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

// stop stops the started servers.
func stop(all []*subject) {
	for _, s := range all {
		decide.Stop(s.Server)
	}
}
