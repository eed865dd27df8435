package decide

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/bench/host"
	"github.com/srtm-io/srtm/internal/local"
)

// Server is a server process under test.
type Server struct {
	*local.Process
	Name, At string // host:port
	Bare     bool   // a bare server: the memory is mostly the benchmark program's
}

// Stop stops the started servers. Errors of a stop do not affect the measurements.
func Stop(all ...*Server) {
	for _, s := range all {
		if s != nil && s.Process != nil {
			_ = s.Process.Stop()
		}
	}
}

// Admission starts the admission daemon in dir, with rules for every key. udp and web are
// two addresses of the same process.
func Admission(ctx context.Context, bin, dir string, rules []*srtmv1.AdmissionRule, flags ...string) (udp, web *Server, err error) {
	ports, err := local.Ports(3)
	if err != nil {
		return nil, nil, err
	}
	p, err := local.Run(filepath.Join(bin, "admission"), dir, append([]string{"--data-path", dir, "--log-level=error",
		"--http-address", ports[0], "--grpc-address", ports[1], "--udp-address", ports[2]}, flags...), local.Answers("http://"+ports[0]+"/healthz"))
	if err != nil {
		return nil, nil, err
	}
	conn, err := grpc.NewClient(ports[1], grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err == nil {
		_, err = srtmv1.NewAdmissionAdminClient(conn).SetRules(ctx, &srtmv1.SetRulesRequest{Rules: rules}, grpc.WaitForReady(true))
		conn.Close()
	}
	if err != nil {
		return nil, nil, errors.Join(err, p.Stop())
	}
	return &Server{Process: p, Name: "admission", At: ports[2]}, &Server{Process: p, Name: "router", At: ports[0]}, nil
}

// Gateway starts the gateway daemon with a policy in dir. admin is the address of the
// daemon's admin API.
func Gateway(bin, dir, policy string, flags ...string) (s *Server, admin string, err error) {
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
	return &Server{Process: p, Name: "gateway", At: ports[0]}, ports[1], err
}

// Generous admits every key.
func Generous() []*srtmv1.AdmissionRule {
	return []*srtmv1.AdmissionRule{{Key: "*", RefillMilli: 1e12, Capacity: 1e9}}
}

// Installed starts an installed program in dir. In the configuration, {at}, {host} and
// {port} stand for the listening address, and {dir} for the folder. In flags, {file} stands
// for the configuration file.
func Installed(name, dir, config string, flags ...string) (*Server, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		if path, err = exec.LookPath("/usr/sbin/" + name); err != nil {
			return nil, fmt.Errorf("%s: %w", name, host.ErrAbsent)
		}
	}
	ports, err := local.Ports(1)
	if err != nil {
		return nil, err
	}
	address, port, _ := net.SplitHostPort(ports[0])
	file := filepath.Join(dir, name+".conf")
	fill := strings.NewReplacer("{at}", ports[0], "{host}", address, "{port}", port, "{dir}", dir, "{file}", file)
	if err := os.WriteFile(file, []byte(fill.Replace(config)), 0o600); err != nil {
		return nil, err
	}
	for i := range flags {
		flags[i] = fill.Replace(flags[i])
	}
	p, err := local.Run(path, dir, flags, local.Accepts(ports[0]))
	return &Server{Process: p, Name: name, At: ports[0]}, err
}

// Redis starts Debian's redis-server.
func Redis(dir string) (*Server, error) {
	return Installed("redis-server", dir, "bind {host}\nport {port}\nsave \"\"\nappendonly no\ndir {dir}\n", "{file}")
}

// Nginx starts Debian's nginx with one worker. http is added to a configuration that keeps
// all files in dir.
func Nginx(dir, http string) (*Server, error) {
	return Installed("nginx", dir, `daemon off; pid {dir}/pid; error_log stderr warn; worker_processes 1; events {}
http { access_log off; client_body_temp_path {dir}/b; proxy_temp_path {dir}/p; fastcgi_temp_path {dir}/f; uwsgi_temp_path {dir}/u; scgi_temp_path {dir}/s;
keepalive_requests 10000000; `+http+` }
`, "-p", dir, "-c", "{file}")
}

// NginxLimit answers with a rate limit per key. The limit is too high to be reached.
const NginxLimit = `limit_req_zone $arg_key zone=keys:10m rate=100000r/s;
server { listen {at}; location / { limit_req zone=keys burst=1000 nodelay; return 200 TRUE; } }`

// HAProxy starts Debian's HAProxy with one thread. more is added after the frontend.
func HAProxy(dir, more string) (*Server, error) {
	return Installed("haproxy", dir, "global\n nbthread 1\ndefaults\n mode http\n timeout connect 5s\n timeout client 60s\n timeout server 60s\nfrontend f\n bind {at}\n"+more+"\n", "-db", "-f", "{file}")
}

// HAProxyLimit is like NginxLimit, with a stick table.
const HAProxyLimit = ` stick-table type string len 64 size 100k expire 60s store http_req_rate(1s)
 http-request track-sc0 url_param(key)
 http-request deny deny_status 429 if { sc_http_req_rate(0) gt 100000 }
 http-request return status 200 content-type text/plain string TRUE`

// HAProxyBefore makes HAProxy a proxy for the server at the address.
func HAProxyBefore(at string) string {
	return " default_backend b\nbackend b\n server one " + at
}
