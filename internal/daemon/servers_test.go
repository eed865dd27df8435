package daemon

import (
	"context"
	"io"
	"log/slog"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/bounded"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/testkit"
)

// limited serves an API without methods, with few descriptors. most is the maximum
// number of connections of the gRPC port.
func limited(t *testing.T, a Addresses) (s *Servers, most int) {
	var limit unix.Rlimit
	testkit.Must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	low := limit
	low.Cur = 64
	testkit.Must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &low))
	defer func() { testkit.Must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)) }() // both ends are ours
	a.GRPC, a.HTTP = "127.0.0.1:0", "127.0.0.1:0"
	testkit.Must(t, a.Validate())
	up := make(chan *Servers, 1)
	testkit.Run(t, func(ctx context.Context) error {
		return a.Serve(ctx, "thing", slog.New(slog.DiscardHandler), nil, func(s *Servers) error {
			srtmv1.RegisterAdminServiceServer(s.GRPC, srtmv1.UnimplementedAdminServiceServer{})
			s.AddServers()
			up <- s
			return nil
		})
	})
	return <-up, bounded.Part(int64(low.Cur), 2, 1000)
}

func count(t *testing.T, s *Servers, name string) (n float64) {
	for _, f := range testkit.Result(s.Metrics.Gather()).Must(t) {
		if f.GetName() == name {
			n = f.Metric[0].GetCounter().GetValue()
		}
	}
	return n
}

// Unauthenticated clients that keep connecting take connection slots only from each other. An
// authenticated client keeps its slot, and another gets in meanwhile.
func TestWhoIsKnownGetsInAmongStrangers(t *testing.T) {
	const token = "admin-0123456789abcdef"
	t.Run("by a token", func(t *testing.T) {
		getsIn(t, secure.ServerConfig{TokenFile: testkit.File(t, "tokens", "admin "+token+"\n")},
			grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithPerRPCCredentials(secure.Bearer(func() string { return token })))
	})
	t.Run("by a certificate", func(t *testing.T) {
		a := testkit.NewAuthority(t)
		server, client := a.Certificate("server"), a.Certificate("client")
		getsIn(t, secure.ServerConfig{CertFile: server.CertFile, KeyFile: server.KeyFile, ClientCAFile: a.File},
			testkit.Result(secure.ClientConfig{CAFile: a.File, CertFile: client.CertFile, KeyFile: client.KeyFile}.Load("")).Must(t)...)
	})
}

func getsIn(t *testing.T, security secure.ServerConfig, as ...grpc.DialOption) {
	s, limit := limited(t, Addresses{security: security})
	address := s.RPCListener.Addr().String()
	var unauthenticated []net.Conn
	crowd := func() {
		for range 2 * limit {
			c, err := net.Dial("tcp", address)
			testkit.Must(t, err)
			unauthenticated = append(unauthenticated, c)
		}
	}
	crowd()
	conn, err := grpc.NewClient(address, as...)
	testkit.Must(t, err)
	defer conn.Close()
	ask := func(moment string) {
		t.Helper()
		_, err := srtmv1.NewAdminServiceClient(conn).ListTopics(t.Context(), &srtmv1.ListTopicsRequest{}, grpc.WaitForReady(true))
		testkit.Equal(t, status.Code(err), codes.Unimplemented, "%s: %v", moment, err)
	}
	ask("all slots were taken")
	crowd()
	testkit.WaitFor(t, "unauthenticated connections take each other's slots", func() bool {
		return count(t, s, "srtm_grpc_connections_evicted_total") == float64(len(unauthenticated)+1-limit)
	})
	testkit.Equal(t, conn.GetState(), connectivity.Ready, "the client, after more unauthenticated connections")
	ask("after more unauthenticated connections")
	testkit.Equal(t, count(t, s, "srtm_grpc_connections_refused_total"), 0, "refused")
	for _, c := range unauthenticated {
		testkit.Must(t, c.Close())
	}
}

// Without authentication, clients that only connect to the gRPC port take no descriptor beyond their
// half, and no existing connection. A further connection is closed immediately and counted.
func TestConnectionsOfGRPCAreBounded(t *testing.T) {
	s, limit := limited(t, Addresses{})
	conn, err := grpc.NewClient(s.RPCListener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	testkit.Must(t, err)
	check := func() {
		t.Helper()
		if _, err := healthv1.NewHealthClient(conn).Check(t.Context(), &healthv1.HealthCheckRequest{}, grpc.WaitForReady(true)); err != nil {
			t.Error(err)
		}
	}
	check()
	unauthenticated := make([]net.Conn, limit)
	for i := range unauthenticated {
		unauthenticated[i], err = net.Dial("tcp", s.RPCListener.Addr().String())
		testkit.Must(t, err)
	}
	last := unauthenticated[limit-1] // gRPC's client has the slot
	testkit.Must(t, last.SetReadDeadline(time.Now().Add(30*time.Second)))
	if text, err := io.ReadAll(last); len(text) > 0 || err != nil {
		t.Errorf("one too many: %q, %v", text, err)
	}
	check()
	if conn.GetState() != connectivity.Ready {
		t.Errorf("the client that was there before: %v", conn.GetState())
	}
	testkit.Equal(t, count(t, s, "srtm_grpc_connections_refused_total"), 1, "refused")
	for _, c := range unauthenticated {
		testkit.Must(t, c.Close())
	}
	testkit.Must(t, conn.Close())
}
