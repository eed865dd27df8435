package store

import (
	"context"
	"crypto/tls"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/etcdtest"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
)

// safe is an etcd server with a certificate. Its only user may access only keys below a prefix.
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
		url: etcdtest.Start(t, etcdtest.Config{Authority: a, User: safeUser, Password: safePassword, Prefix: safePrefix}).URL,
	}
}

func (s *safe) config() EtcdConfig {
	return EtcdConfig{
		Client: clientv3.Config{
			Endpoints: []string{s.url}, Username: safeUser, Password: safePassword, DialTimeout: testkit.Hang, Logger: zap.NewNop(),
			TLS: &tls.Config{RootCAs: s.authority.Pool, Certificates: []tls.Certificate{s.client.TLS}, MinVersion: tls.VersionTLS12},
		},
		Prefix: safePrefix, Lease: time.Minute,
	}
}

func (s *safe) store(t *testing.T, cfg EtcdConfig) *Etcd {
	t.Helper()
	e := testkit.Result(NewEtcd(t.Context(), cfg)).Must(t)
	t.Cleanup(func() { _ = e.Close() })
	return e
}

func TestWhomEtcdRefuses(t *testing.T) {
	t.Parallel()
	s := newSafe(t)
	wrong := s.config()
	wrong.Client.Password = "open barley"
	_, err := NewEtcd(t.Context(), wrong)
	testkit.ErrorHas(t, err, "invalid user ID or password", "a wrong password")
	endless := s.config()
	endless.Client.DialTimeout = 0
	_, err = NewEtcd(t.Context(), endless)
	testkit.ErrorHas(t, err, "dial timeout", "no dial timeout")
	elsewhere := s.config()
	elsewhere.Prefix = "/others/"
	_, _, err = s.store(t, elsewhere).Lead(t.Context(), "me:1")
	testkit.ErrorHas(t, err, "permission denied", "keys of others")
	foreign := testkit.NewAuthority(t)
	for name, change := range map[string]func(*tls.Config){
		"no certificate":           func(c *tls.Config) { c.Certificates = nil },
		"another authority's":      func(c *tls.Config) { c.Certificates = []tls.Certificate{foreign.Certificate("client").TLS} },
		"a server of no authority": func(c *tls.Config) { c.RootCAs = foreign.Pool },
	} {
		cfg := s.config()
		cfg.Client.DialTimeout = 500 * time.Millisecond
		change(cfg.Client.TLS)
		// The store treats this as an unavailable etcd, which may recover.
		if leader, err := s.store(t, cfg).Leader(t.Context()); err == nil {
			t.Errorf("%s: led by %q", name, leader)
		}
	}
}

// A process with a password starts while etcd is unavailable, as a process without a password does.
func TestEtcdComesLate(t *testing.T) {
	t.Parallel()
	address := testkit.Result(local.Ports(1)).Must(t)[0]
	s := &safe{authority: testkit.NewAuthority(t), url: "https://" + address}
	s.client = s.authority.Certificate("client")
	cfg := s.config()
	cfg.Client.DialTimeout = 200 * time.Millisecond
	e := s.store(t, cfg)
	if _, err := e.Leader(t.Context()); err == nil {
		t.Error("an etcd that is not there has a leader")
	}
	etcdtest.Start(t, etcdtest.Config{Authority: s.authority, User: safeUser, Password: safePassword, Prefix: safePrefix, Address: address})
	testkit.WaitUntil(t, func() string {
		if _, err := e.Leader(t.Context()); err != nil {
			return err.Error()
		}
		return ""
	})
	l := lead(t, e)
	l.append(joined("b1"))
	l.resign()
	testkit.NoError(t, e.Close())
	_, err := e.Leader(t.Context())
	testkit.ErrorIs(t, err, errClosed, "after the end")
}

// A user's first connection is abandoned when the process stops. Otherwise it may take as
// long as the dial timeout.
func TestDialingEndsWithItsContext(t *testing.T) {
	t.Parallel()
	ln := testkit.Listen(t) // accepts no connection
	ctx, stop := context.WithCancel(t.Context())
	cfg := EtcdConfig{
		Client: clientv3.Config{Endpoints: []string{"http://" + ln.Addr().String()}, Username: "u", Password: "p", DialTimeout: time.Hour, Logger: zap.NewNop()},
		Prefix: "/silent/", Lease: time.Second,
	}
	ended := make(chan error, 1)
	go func() {
		_, err := NewEtcd(ctx, cfg)
		ended <- err
	}()
	stop()
	select {
	case err := <-ended:
		if !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	case <-time.After(testkit.Hang):
		t.Error("the store still works")
	}
}

func TestAFollowerIsToldThatEtcdIsAway(t *testing.T) {
	t.Parallel()
	e, err := NewEtcd(t.Context(), EtcdConfig{
		Client: clientv3.Config{Endpoints: []string{testkit.Address(t)}, Logger: zap.NewNop()}, Prefix: "/absent/", Lease: time.Second,
	})
	testkit.Must(t, err)
	t.Cleanup(func() { _ = e.Close() })
	f := follow(t, e)
	testkit.WaitFor(t, "the news", func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.cuts > 0
	})
}

// A leader that loses etcd while it writes a dump notices the end of its term, and the dump ends.
func TestADumpDoesNotWaitForAnEtcdThatHasGone(t *testing.T) {
	t.Parallel()
	address := etcdtest.Start(t, etcdtest.Config{}).URL
	for _, method := range []string{"/etcdserverpb.KV/Range", "/etcdserverpb.KV/Compact"} {
		var gone atomic.Bool
		e, err := NewEtcd(t.Context(), EtcdConfig{
			Client: clientv3.Config{
				Endpoints: []string{address}, Logger: zap.NewNop(),
				DialOptions: []grpc.DialOption{grpc.WithChainUnaryInterceptor(func(ctx context.Context, called string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
					if called == method && gone.Load() {
						<-ctx.Done()
						return ctx.Err()
					}
					return invoke(ctx, called, req, reply, conn, options...)
				})},
			},
			Prefix: "/gone" + method + "/", Lease: 3 * time.Second,
		})
		testkit.Must(t, err)
		t.Cleanup(func() { _ = e.Close() })
		l := lead(t, e)
		l.append(joined("b1"))
		testkit.Must(t, l.term.Compact(t.Context(), l.cat.Dump()))
		l.append(slices.Repeat([]catalog.Event{joined("b1")}, historyAfter)...)
		gone.Store(true)
		ended := make(chan error, 1)
		go func() { ended <- l.term.Compact(context.Background(), l.cat.Dump()) }()
		select {
		case err := <-ended:
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s: %v", method, err)
			}
		case <-time.After(testkit.Hang):
			t.Errorf("%s is waited for", method)
		}
		gone.Store(false)
	}
}

// The store keeps topics and a catalog larger than etcd's largest request, and deleted data does not
// take room for ever.
func TestEtcdOfLittleRoom(t *testing.T) {
	t.Parallel()
	address := etcdtest.Start(t, etcdtest.Config{MaxRequestBytes: 1 << 19}).URL
	s := etcdStore(t, address, "/r/")
	l := lead(t, s)
	l.append(joined("b1"), joined("b2"))
	l.append(placed(t, l.cat, "t", "", 20_000, 10))
	client, err := s.client(t.Context())
	testkit.Must(t, err)
	dump := func() (revision int64) {
		t.Helper()
		testkit.Must(t, l.term.Compact(t.Context(), l.cat.Dump()))
		r := testkit.Result(client.Get(t.Context(), "/r/snapshot")).Must(t)
		return r.Kvs[0].ModRevision
	}
	forgotten := func(revision int64) bool {
		_, err := client.Get(t.Context(), "/r/head", clientv3.WithRev(revision))
		if err != nil && !errors.Is(err, rpctypes.ErrCompacted) {
			t.Fatal(err)
		}
		return err != nil
	}
	first := dump()
	l.append(joined("b3"))
	second := dump()
	if forgotten(first - 1) {
		t.Error("etcd forgets after a few events")
	}
	var events []catalog.Event
	for range historyAfter {
		events = append(events, joined("b3"))
	}
	l.append(events...)
	third := dump()
	if !forgotten(second-1) || forgotten(second) {
		t.Errorf("etcd has forgotten what was before the last dump: %v; the last dump: %v", forgotten(second-1), forgotten(second))
	}
	// A few large events weigh as much as many small events.
	l.term.(*etcdTerm).written = historyBytes - 1
	l.append(joined("b3"))
	dump()
	if !forgotten(third - 1) {
		t.Errorf("etcd keeps %d bytes of events that were dumped", historyBytes)
	}
	l.resign()
	mustEqual(t, lead(t, etcdStore(t, address, "/r/")).cat, l.cat)
}

// An etcd without space (its NOSPACE alarm) refuses events, and the term continues.
func TestAFullEtcdRefuses(t *testing.T) {
	t.Parallel()
	s := etcdStore(t, etcdtest.Start(t, etcdtest.Config{}).URL, "/r/")
	l := lead(t, s)
	l.append(joined("b1"))
	client := testkit.Result(s.client(t.Context())).Must(t)
	alarm := func(action etcdserverpb.AlarmRequest_AlarmAction) {
		t.Helper()
		_, err := etcdserverpb.NewMaintenanceClient(client.ActiveConnection()).Alarm(t.Context(), &etcdserverpb.AlarmRequest{Action: action, Alarm: etcdserverpb.AlarmType_NOSPACE})
		testkit.Must(t, err)
	}
	alarm(etcdserverpb.AlarmRequest_ACTIVATE)
	for range 2 {
		testkit.ErrorIs(t, l.term.Append(t.Context(), l.cat.Version(), []catalog.Event{joined("b2")}), ErrFull, "an append")
	}
	before := l.term.Until()
	testkit.WaitFor(t, "the term is kept up", func() bool { return before.Before(l.term.Until()) })
	alarm(etcdserverpb.AlarmRequest_DEACTIVATE)
	l.append(joined("b2"))
	l.resign()
	mustEqual(t, lead(t, etcdStore(t, client.Endpoints()[0], "/r/")).cat, l.cat)
}

// A campaign that is cancelled while etcd does not answer ends soon, and Close does, too.
func TestCallingOffACampaignDoesNotWaitForEtcd(t *testing.T) {
	t.Parallel()
	server := etcdtest.Start(t, etcdtest.Config{})
	lead(t, etcdStore(t, server.URL, "/r/"))
	s := etcdStore(t, server.URL, "/r/")
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, _, err := s.Lead(ctx, "second:1")
		ended <- err
	}()
	client := testkit.Result(s.client(t.Context())).Must(t)
	testkit.WaitFor(t, "a second candidate", func() bool {
		r, err := client.Get(t.Context(), "/r/leader/", clientv3.WithPrefix())
		return err == nil && r.Count == 2
	})
	server.Stop()
	t.Cleanup(server.Restart) // the leader resigns
	cancel()
	testkit.ErrorIs(t, <-ended, context.Canceled, "the end")
	testkit.NoError(t, s.Close())
}
