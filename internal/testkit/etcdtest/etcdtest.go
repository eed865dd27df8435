// Package etcdtest runs a real etcd server with one member for a test, without TLS or
// with certificates and passwords. Only _test files import it.
package etcdtest

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
)

// Config configures a server. The zero value serves all clients without TLS.
type Config struct {
	// Authority signs the server's certificate and its clients' certificates.
	Authority *testkit.Authority
	// User, with Password, may access the keys below Prefix, and other users nothing.
	// Empty: no passwords.
	User, Password, Prefix string
	// Address is the listen address; empty: any loopback port.
	Address string
	// MaxRequestBytes bounds a request; 0: etcd's default.
	MaxRequestBytes uint
}

// Server is a server of one member. It ends with its test.
type Server struct {
	URL     string
	t       testing.TB
	program string
	dir     string
	flags   []string
	tls     *tls.Config    // an operator's; nil: without TLS
	process *local.Process // nil: stopped
}

// Start runs a server until the test ends.
func Start(t testing.TB, cfg Config) *Server {
	t.Helper()
	s := &Server{t: t, program: testkit.Tool(t, "go.etcd.io/etcd/server/v3"), dir: t.TempDir()}
	if cfg.Authority != nil {
		operator := cfg.Authority.Certificate("operator")
		s.tls = &tls.Config{RootCAs: cfg.Authority.Pool, Certificates: []tls.Certificate{operator.TLS}, MinVersion: tls.VersionTLS12}
	}
	_, err := local.OnFreePorts(2, func(addresses []string) (*local.Process, error) {
		s.configure(cfg, cmp.Or(cfg.Address, addresses[0]), addresses[1])
		return nil, s.start()
	})
	testkit.Must(t, err)
	t.Cleanup(s.Stop)
	if cfg.User != "" {
		s.protect(cfg)
	}
	return s
}

func (s *Server) configure(cfg Config, client, peer string) {
	scheme := "http"
	s.flags = []string{
		"--data-dir=" + s.dir, "--log-level=error", "--heartbeat-interval=50", "--election-timeout=500",
		"--unsafe-no-fsync", // durability is not under test here
		"--bcrypt-cost=4",   // the minimum
		"--listen-peer-urls=http://" + peer, "--initial-advertise-peer-urls=http://" + peer, "--initial-cluster=default=http://" + peer,
	}
	if cfg.MaxRequestBytes > 0 {
		s.flags = append(s.flags, fmt.Sprintf("--max-request-bytes=%d", cfg.MaxRequestBytes))
	}
	if cfg.Authority != nil {
		scheme = "https"
		certificate := cfg.Authority.Certificate("etcd")
		s.flags = append(s.flags, "--cert-file="+certificate.CertFile, "--key-file="+certificate.KeyFile, "--trusted-ca-file="+cfg.Authority.File, "--client-cert-auth")
	}
	s.URL = scheme + "://" + client
	s.flags = append(s.flags, "--listen-client-urls="+s.URL, "--advertise-client-urls="+s.URL)
}

// start returns once the server answers or has ended.
func (s *Server) start() error {
	c, err := s.client()
	if err != nil {
		return err
	}
	defer c.Close()
	p, err := local.Run(s.program, s.dir, s.flags, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_, err := c.Status(ctx, s.URL)
		return err
	})
	if err == nil {
		s.process = p
	}
	return err
}

func (s *Server) client() (*clientv3.Client, error) {
	return clientv3.New(clientv3.Config{Endpoints: []string{s.URL}, DialTimeout: testkit.Hang, TLS: s.tls, Logger: zap.NewNop()})
}

// Stop stops the server, which keeps its data.
func (s *Server) Stop() {
	if s.process == nil {
		return
	}
	if err := s.process.Signal(syscall.SIGTERM); err != nil {
		s.t.Error(err)
	}
	<-s.process.Done() // ends with the same signal, which etcd raises again
	s.process = nil
}

// Restart starts a stopped server.
func (s *Server) Restart() {
	s.t.Helper()
	testkit.Must(s.t, s.start())
}

// protect admits only the user with the password, and root, which etcd requires.
func (s *Server) protect(cfg Config) {
	s.t.Helper()
	c, err := s.client()
	testkit.Must(s.t, err)
	defer c.Close()
	ctx, cancel := context.WithTimeout(s.t.Context(), testkit.Hang)
	defer cancel()
	all := clientv3.PermissionType(clientv3.PermReadWrite)
	for _, step := range []func() error{
		func() error { _, err := c.UserAdd(ctx, "root", "root's"); return err },
		func() error { _, err := c.UserGrantRole(ctx, "root", "root"); return err },
		func() error { _, err := c.UserAdd(ctx, cfg.User, cfg.Password); return err },
		func() error { _, err := c.RoleAdd(ctx, cfg.User); return err },
		func() error {
			_, err := c.RoleGrantPermission(ctx, cfg.User, cfg.Prefix, clientv3.GetPrefixRangeEnd(cfg.Prefix), all)
			return err
		},
		func() error { _, err := c.UserGrantRole(ctx, cfg.User, cfg.User); return err },
		func() error { _, err := c.AuthEnable(ctx); return err },
	} {
		testkit.Must(s.t, step())
	}
}
