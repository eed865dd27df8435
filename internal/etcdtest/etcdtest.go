package etcdtest

import (
	"cmp"
	"context"
	"crypto/tls"
	"net/url"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"

	"github.com/srtm-io/srtm/internal/testkit"
)

// patience is how long to wait for what must happen.
const patience = 30 * time.Second

// Config is whom the server serves; the zero value: everybody, in clear.
type Config struct {
	// Authority signs the server's certificate, and those that clients must show.
	Authority *testkit.Authority
	// User, with the password, may read and write what begins with the prefix,
	// and nobody else anything. Empty: no passwords.
	User, Password, Prefix string
	// Address is where it listens; empty: on any port of loopback.
	Address string
	// MaxRequestBytes bounds a request; 0: etcd's default.
	MaxRequestBytes uint
}

// Start runs a server until the test ends, and returns its URL.
func Start(t testing.TB, cfg Config) string {
	t.Helper()
	e := embed.NewConfig()
	e.Dir = t.TempDir()
	e.UnsafeNoFsync = true // what the disk keeps is etcd's own test
	e.TickMs, e.ElectionMs = 20, 200
	e.BcryptCost = 4 // the least there is
	e.MaxRequestBytes = cmp.Or(cfg.MaxRequestBytes, e.MaxRequestBytes)
	e.LogLevel = "error"
	e.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	client, peer := url.URL{Scheme: "http", Host: cmp.Or(cfg.Address, "127.0.0.1:0")}, url.URL{Scheme: "http", Host: "127.0.0.1:0"}
	if cfg.Authority != nil {
		client.Scheme = "https"
		own := cfg.Authority.Certificate("etcd")
		e.ClientTLSInfo.CertFile, e.ClientTLSInfo.KeyFile = own.CertFile, own.KeyFile
		e.ClientTLSInfo.TrustedCAFile, e.ClientTLSInfo.ClientCertAuth = cfg.Authority.File, true
	}
	e.ListenClientUrls, e.AdvertiseClientUrls = []url.URL{client}, []url.URL{client}
	e.ListenPeerUrls, e.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	e.InitialCluster = e.InitialClusterFromName(e.Name)
	run, err := embed.StartEtcd(e)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(run.Close)
	select {
	case <-run.Server.ReadyNotify():
	case <-time.After(patience):
		t.Fatal("etcd is not ready")
	}
	client.Host = run.Clients[0].Addr().String()
	if cfg.User != "" {
		cfg.protect(t, client.String())
	}
	return client.String()
}

// protect lets in who shows the user's password, and root, whom etcd needs.
func (cfg Config) protect(t testing.TB, at string) {
	t.Helper()
	as := clientv3.Config{Endpoints: []string{at}, DialTimeout: patience, Logger: zap.NewNop()}
	if cfg.Authority != nil {
		operator := cfg.Authority.Certificate("operator")
		as.TLS = &tls.Config{RootCAs: cfg.Authority.Pool, Certificates: []tls.Certificate{operator.TLS}, MinVersion: tls.VersionTLS12}
	}
	c, err := clientv3.New(as)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	all := clientv3.PermissionType(clientv3.PermReadWrite)
	for _, do := range []func() error{
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
		if err := do(); err != nil {
			t.Fatal(err)
		}
	}
}
