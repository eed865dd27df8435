package store

import (
	"crypto/tls"
	"errors"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/srtm-io/srtm/internal/etcdtest"
	"github.com/srtm-io/srtm/internal/testkit"
)

// safe is an etcd server that serves one user, who may do nothing but what is
// below a prefix, and shows a certificate.
type safe struct {
	authority *testkit.Authority
	url       string
	client    testkit.Certificate
}

const (
	safeUser     = "loaddistributor"
	safePassword = "open sesame"
	safePrefix   = "/safe/"
)

func newSafe(t *testing.T) *safe {
	a := testkit.NewAuthority(t)
	return &safe{
		authority: a, client: a.Certificate("client"),
		url: etcdtest.Start(t, etcdtest.Config{Authority: a, User: safeUser, Password: safePassword, Prefix: safePrefix}),
	}
}

func (s *safe) config() EtcdConfig {
	return EtcdConfig{
		Client: clientv3.Config{
			Endpoints: []string{s.url}, Username: safeUser, Password: safePassword, DialTimeout: patience, Logger: zap.NewNop(),
			TLS: &tls.Config{RootCAs: s.authority.Pool, Certificates: []tls.Certificate{s.client.TLS}, MinVersion: tls.VersionTLS12},
		},
		Prefix: safePrefix, Lease: time.Second,
	}
}

func (s *safe) store(t *testing.T, cfg EtcdConfig) *Etcd {
	t.Helper()
	e, err := NewEtcd(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.Close() })
	return e
}

func TestWhomEtcdRefuses(t *testing.T) {
	s := newSafe(t)
	wrong := s.config()
	wrong.Client.Password = "open barley"
	if _, err := NewEtcd(wrong); err == nil || !strings.Contains(err.Error(), "invalid user ID or password") {
		t.Errorf("a wrong password: %v", err)
	}
	endless := s.config()
	endless.Client.DialTimeout = 0
	if _, err := NewEtcd(endless); err == nil || !strings.Contains(err.Error(), "dial timeout") {
		t.Errorf("no dial timeout: %v", err)
	}
	elsewhere := s.config()
	elsewhere.Prefix = "/others/"
	if _, _, err := s.store(t, elsewhere).Lead(t.Context(), "me:1"); err == nil || !strings.Contains(err.Error(), "permission denied") {
		t.Errorf("keys of others: %v", err)
	}
	foreign := testkit.NewAuthority(t)
	for name, change := range map[string]func(*tls.Config){
		"no certificate":          func(c *tls.Config) { c.Certificates = nil },
		"a stranger's":            func(c *tls.Config) { c.Certificates = []tls.Certificate{foreign.Certificate("client").TLS} },
		"a server nobody vouches": func(c *tls.Config) { c.RootCAs = foreign.Pool },
	} {
		cfg := s.config()
		cfg.Client.DialTimeout = 500 * time.Millisecond
		change(cfg.Client.TLS)
		// To us that is an etcd that is not there, which may change.
		if who, err := s.store(t, cfg).Leader(t.Context()); err == nil {
			t.Errorf("%s: led by %q", name, who)
		}
	}
}

// A process with a password starts while etcd is away, as one without does.
func TestEtcdComesLate(t *testing.T) {
	ln := testkit.Listen(t)
	address := ln.Addr().String()
	ln.Close()
	s := &safe{authority: testkit.NewAuthority(t), url: "https://" + address}
	s.client = s.authority.Certificate("client")
	cfg := s.config()
	cfg.Client.DialTimeout = 200 * time.Millisecond
	e := s.store(t, cfg)
	if _, err := e.Leader(t.Context()); err == nil {
		t.Error("an etcd that is not there has a leader")
	}
	etcdtest.Start(t, etcdtest.Config{Authority: s.authority, User: safeUser, Password: safePassword, Prefix: safePrefix, Address: address})
	limit := time.Now().Add(patience)
	for {
		_, err := e.Leader(t.Context())
		if err == nil {
			break
		}
		if time.Now().After(limit) {
			t.Fatal(err)
		}
	}
	l := lead(t, e)
	l.append(joined("b1"))
	l.resign()
	if err := e.Close(); err != nil {
		t.Error(err)
	}
	if _, err := e.Leader(t.Context()); !errors.Is(err, errClosed) {
		t.Errorf("after the end: %v", err)
	}
}
