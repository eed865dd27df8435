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
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/srtm-io/srtm/internal/connlimit"
	"github.com/srtm-io/srtm/internal/testkit"
)

// Strangers that only connect to the gRPC port take no descriptor beyond their half, and no
// connection that was there before: one more is closed at once, and counted.
func TestConnectionsOfGRPCAreBounded(t *testing.T) {
	var limit unix.Rlimit
	testkit.Must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	low := limit
	low.Cur = 64
	testkit.Must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &low))
	most := connlimit.Part(int64(low.Cur), 2, 1000)
	defer func() { testkit.Must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)) }()

	a := Addresses{GRPC: "127.0.0.1:0", HTTP: "127.0.0.1:0"}
	testkit.Must(t, a.Validate())
	ctx, stop := context.WithCancel(t.Context())
	up, ended := make(chan *Servers, 1), make(chan error, 1)
	go func() {
		ended <- a.Serve(ctx, "thing", slog.New(slog.DiscardHandler), nil, func(s *Servers) error {
			s.AddServers()
			up <- s
			return nil
		})
	}()
	s := <-up
	testkit.Must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)) // both ends are ours
	conn, err := grpc.NewClient(s.RPCListener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	testkit.Must(t, err)
	check := func() {
		t.Helper()
		if _, err := healthv1.NewHealthClient(conn).Check(t.Context(), &healthv1.HealthCheckRequest{}, grpc.WaitForReady(true)); err != nil {
			t.Error(err)
		}
	}
	check()
	strangers := make([]net.Conn, most)
	for i := range strangers {
		strangers[i], err = net.Dial("tcp", s.RPCListener.Addr().String())
		testkit.Must(t, err)
	}
	last := strangers[most-1] // gRPC's client has the slot
	testkit.Must(t, last.SetReadDeadline(time.Now().Add(30*time.Second)))
	if text, err := io.ReadAll(last); len(text) > 0 || err != nil {
		t.Errorf("one too many: %q, %v", text, err)
	}
	check()
	if conn.GetState() != connectivity.Ready {
		t.Errorf("the client that was there before: %v", conn.GetState())
	}
	families, err := s.Metrics.Gather()
	testkit.Must(t, err)
	refused := 0.0
	for _, f := range families {
		if f.GetName() == "srtm_grpc_connections_refused_total" {
			refused = f.Metric[0].GetCounter().GetValue()
		}
	}
	if refused != 1 {
		t.Errorf("%v refused", refused)
	}
	for _, stranger := range strangers {
		testkit.Must(t, stranger.Close())
	}
	testkit.Must(t, conn.Close())
	stop()
	testkit.Must(t, <-ended)
}
