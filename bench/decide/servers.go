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

// Server is a process that is asked.
type Server struct {
	*local.Process
	Name, At string // host:port
	Bare     bool   // a bare server: its memory is mostly the rest of this program
}

// Stop stops the servers that have started. Errors of a stop say nothing of what was measured.
func Stop(all ...*Server) {
	for _, s := range all {
		if s != nil && s.Process != nil {
			_ = s.Process.Stop()
		}
	}
}

// Admission runs the daemon with a rule for every key, in dir. udp and web are the same
// process as it is asked by either protocol.
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

// Gateway runs the daemon with a policy, in dir. admin is where the daemon says how it is.
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

// Generous has every key admitted.
func Generous() []*srtmv1.AdmissionRule {
	return []*srtmv1.AdmissionRule{{Key: "*", RefillMilli: 1e12, Capacity: 1e9}}
}

// Installed runs a program of the system's with a configuration in dir: in that {at}, {host}
// and {port} are where it is to listen, {dir} the folder; in flags {file} is the configuration.
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

// Redis runs Debian's.
func Redis(dir string) (*Server, error) {
	return Installed("redis-server", dir, "bind {host}\nport {port}\nsave \"\"\nappendonly no\ndir {dir}\n", "{file}")
}

// Nginx runs Debian's with one worker, and http beside what has it keep to dir.
func Nginx(dir, http string) (*Server, error) {
	return Installed("nginx", dir, `daemon off; pid {dir}/pid; error_log stderr warn; worker_processes 1; events {}
http { access_log off; client_body_temp_path {dir}/b; proxy_temp_path {dir}/p; fastcgi_temp_path {dir}/f; uwsgi_temp_path {dir}/u; scgi_temp_path {dir}/s;
keepalive_requests 10000000; `+http+` }
`, "-p", dir, "-c", "{file}")
}

// NginxLimit answers within a rate for each key that no key reaches.
const NginxLimit = `limit_req_zone $arg_key zone=keys:10m rate=100000r/s;
server { listen {at}; location / { limit_req zone=keys burst=1000 nodelay; return 200 TRUE; } }`

// HAProxy runs Debian's with one thread, and more below its frontend.
func HAProxy(dir, more string) (*Server, error) {
	return Installed("haproxy", dir, "global\n nbthread 1\ndefaults\n mode http\n timeout connect 5s\n timeout client 60s\n timeout server 60s\nfrontend f\n bind {at}\n"+more+"\n", "-db", "-f", "{file}")
}

// HAProxyLimit is as NginxLimit, with a stick table.
const HAProxyLimit = ` stick-table type string len 64 size 100k expire 60s store http_req_rate(1s)
 http-request track-sc0 url_param(key)
 http-request deny deny_status 429 if { sc_http_req_rate(0) gt 100000 }
 http-request return status 200 content-type text/plain string TRUE`

// HAProxyBefore is another server behind it.
func HAProxyBefore(at string) string {
	return " default_backend b\nbackend b\n server one " + at
}
