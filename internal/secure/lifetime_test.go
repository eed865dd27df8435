package secure

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/bounded"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/testkit"
)

// A connection ends a second after the last second of its certificate, even if the clock was changed
// meanwhile. A connection that ended earlier is released.
func TestAConnectionEndsWithItsCertificate(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		l := &lifetimes{log: &atomic.Pointer[slog.Logger]{}}
		until := time.Now().Add(36 * time.Hour)
		state := tls.ConnectionState{VerifiedChains: [][]*x509.Certificate{{{NotAfter: until}}}}
		var ended atomic.Int64
		release := l.watch(state, "a", func() { ended.Add(1) })
		l.watch(state, "b", func() { ended.Add(1) })
		l.watch(tls.ConnectionState{}, "without a certificate", func() { ended.Add(1) })
		testkit.Equal(t, len(l.mu.open), 2, "held")
		release()
		clock.Sleep(t.Context(), 36*time.Hour)
		synctest.Wait()
		testkit.Equal(t, ended.Load(), 0, "ended in the last second")
		clock.Sleep(t.Context(), time.Second)
		synctest.Wait()
		testkit.Equal(t, ended.Load(), 1, "ended")
		testkit.Equal(t, len(l.mu.open), 0, "held")
		release() // again
		l.watch(state, "late", func() { ended.Add(1) })
		synctest.Wait()
		testkit.Equal(t, ended.Load(), 2, "ended at once")
	})
}

// Over gRPC and HTTPS, a client loses its connection and gets no new connection when its certificate
// expires, or when a reloaded list revokes it. Other clients keep their connections.
func TestCertificatesThatExpireOrAreRevoked(t *testing.T) {
	a := testkit.NewAuthority(t)
	server, revoked, other := a.Certificate("server"), a.Certificate("revoked"), a.Certificate("other")
	brief := a.Until("brief", time.Now().Add(2*time.Second))
	list := filepath.Join(t.TempDir(), "crl.pem")
	testkit.Must(t, os.WriteFile(list, a.Revoke(), 0o600))
	s := testkit.Result(ServerConfig{CertFile: server.CertFile, KeyFile: server.KeyFile, ClientCAFile: a.File, CRLFile: list, HTTPTLS: true}.Load()).Must(t)
	rpc := grpc.NewServer(s.Options()...)
	srtmv1.RegisterAdminServiceServer(rpc, srtmv1.UnimplementedAdminServiceServer{})
	slots := &bounded.Slots{}
	ln := &bounded.Listener{Listener: testkit.Result(net.Listen("tcp", "127.0.0.1:0")).Must(t), Slots: slots}
	done := make(chan error)
	go func() { done <- rpc.Serve(ln) }()
	defer func() { rpc.Stop(); testkit.Must(t, <-done) }()
	web := s.Listener(&bounded.Listener{Listener: testkit.Result(net.Listen("tcp", "127.0.0.1:0")).Must(t), Slots: slots})
	defer web.Close()
	go func() {
		for {
			c, err := web.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(c, c); c.Close() }()
		}
	}()
	type client struct {
		rpc *grpc.ClientConn
		web *tls.Conn
	}
	connect := func(c testkit.Certificate) client {
		conn := dial(t, ln.Addr().String(), ClientConfig{CAFile: a.File, CertFile: c.CertFile, KeyFile: c.KeyFile})
		testkit.Equal(t, status.Code(ask(t, conn, srtmv1.AdminService_ListTopics_FullMethodName)), codes.Unimplemented)
		secured := testkit.Result(tls.Dial("tcp", web.Addr().String(), &tls.Config{RootCAs: a.Pool, Certificates: []tls.Certificate{c.TLS}})).Must(t)
		t.Cleanup(func() { secured.Close() })
		testkit.Result(secured.Write([]byte("x"))).Must(t)
		testkit.Result(io.ReadFull(secured, make([]byte, 1))).Must(t)
		return client{conn, secured}
	}
	ends := func(c client) {
		t.Helper()
		if n, err := c.web.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("read %d, %v; want the end", n, err)
		}
		for state := c.rpc.GetState(); state == connectivity.Ready; state = c.rpc.GetState() {
			c.rpc.WaitForStateChange(t.Context(), state)
		}
		testkit.Equal(t, status.Code(ask(t, c.rpc, srtmv1.AdminService_ListTopics_FullMethodName)), codes.Unavailable)
	}
	kept, out := connect(other), connect(revoked)
	ends(connect(brief))
	testkit.Must(t, os.WriteFile(list, a.Revoke(revoked), 0o600))
	ReadAgain()
	ends(out)
	testkit.Result(kept.web.Write([]byte("x"))).Must(t)
	testkit.Result(io.ReadFull(kept.web, make([]byte, 1))).Must(t)
	testkit.Equal(t, kept.rpc.GetState(), connectivity.Ready)
	testkit.Equal(t, status.Code(ask(t, kept.rpc, srtmv1.AdminService_ListTopics_FullMethodName)), codes.Unimplemented)
	testkit.WaitFor(t, "the slots of those that have ended", func() bool { return slots.Open() == 2 })
	s.tls.lives.mu.Lock()
	testkit.Equal(t, len(s.tls.lives.mu.open), 2, "held")
	s.tls.lives.mu.Unlock()
	// A list with a fault changes nothing.
	testkit.Must(t, os.WriteFile(list, testkit.NewAuthority(t).Revoke(other), 0o600))
	ReadAgain()
	testkit.Equal(t, status.Code(ask(t, kept.rpc, srtmv1.AdminService_ListTopics_FullMethodName)), codes.Unimplemented)
}

func TestFaultsOfRevocations(t *testing.T) {
	a, other := testkit.NewAuthority(t), testkit.NewAuthority(t)
	server := a.Certificate("server")
	for want, text := range map[string][]byte{
		"none of the authorities has signed it": other.Revoke(),
		"no list of revoked certificates":       []byte("x"),
		`PEM block "CERTIFICATE"`:               testkit.Result(os.ReadFile(a.File)).Must(t),
	} {
		list := testkit.File(t, "crl", string(text))
		_, err := ServerConfig{CertFile: server.CertFile, KeyFile: server.KeyFile, ClientCAFile: a.File, CRLFile: list}.Load()
		testkit.ErrorHas(t, err, want, "%s", text)
		testkit.ErrorHas(t, err, "--tls-crl", "%s", text)
	}
	_, err := ServerConfig{CertFile: server.CertFile, KeyFile: server.KeyFile, CRLFile: "x"}.Load()
	testkit.ErrorHas(t, err, "--tls-crl needs --tls-client-ca")
}
