package service_test

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/internal/testkit"
)

// serving runs a server until the test's bubble ends. dial connects to the server.
func serving(t *testing.T) (dial func(context.Context, string) (net.Conn, error), stop func()) {
	ln := testkit.NewPiped()
	server := grpc.NewServer(service.ServerOptions()...)
	healthv1.RegisterHealthServer(server, health.NewServer())
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(ln) }()
	return func(context.Context, string) (net.Conn, error) {
			mine, theirs := net.Pipe()
			ln.Conns <- theirs
			return mine, nil
		}, func() {
			server.Stop()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}
}

// A peer that connects and sends nothing is cut off in time for others to connect.
func TestAPeerThatSaysNothingIsCutOff(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		dial, stop := serving(t)
		defer stop()
		conn, _ := dial(t.Context(), "")
		began := time.Now()
		_, _ = io.Copy(io.Discard, conn) // gRPC greets first
		if took := time.Since(began); took > service.HandshakeTimeout {
			t.Errorf("after %v", took)
		}
	})
}

// A connection without a call is closed, and the next call opens another connection. A connection with
// a call stays open.
func TestAConnectionWithoutACallIsClosed(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		dial, stop := serving(t)
		defer stop()
		var dialled, open atomic.Int64
		conn, err := grpc.NewClient("passthrough:server", grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(func(ctx context.Context, to string) (net.Conn, error) {
			dialled.Add(1)
			open.Add(1)
			c, err := dial(ctx, to)
			return counted{c, sync.OnceFunc(func() { open.Add(-1) })}, err
		}))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		client := healthv1.NewHealthClient(conn)
		for call := range int64(2) {
			if _, err := client.Check(t.Context(), &healthv1.HealthCheckRequest{}); err != nil || dialled.Load() != call+1 {
				t.Errorf("call %d: %v, %d connections so far", call, err, dialled.Load())
			}
			<-time.After(service.IdleTimeout / 2)
			if open.Load() != 1 {
				t.Errorf("call %d: %d connections are open soon after it", call, open.Load())
			}
			<-time.After(service.IdleTimeout)
			if open.Load() != 0 {
				t.Errorf("call %d: %d connections are open long after it", call, open.Load())
			}
		}
		watching, cancel := context.WithCancel(t.Context())
		defer cancel()
		watch, err := client.Watch(watching, &healthv1.HealthCheckRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := watch.Recv(); err != nil {
			t.Fatal(err)
		}
		<-time.After(10 * service.IdleTimeout)
		if open.Load() != 1 || dialled.Load() != 3 {
			t.Errorf("with a call: %d of %d connections are open", open.Load(), dialled.Load())
		}
	})
}

// The server must hold complete headers before it knows anything about the sender.
func TestHugeHeaders(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		dial, stop := serving(t)
		defer stop()
		conn := testkit.Result(grpc.NewClient("passthrough:server", grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(dial))).Must(t)
		defer conn.Close()
		for size, want := range map[int]codes.Code{10_000: codes.OK, 100_000: codes.Internal} {
			ctx := metadata.AppendToOutgoingContext(t.Context(), "x", strings.Repeat("x", size))
			_, err := healthv1.NewHealthClient(conn).Check(ctx, &healthv1.HealthCheckRequest{})
			testkit.Equal(t, status.Code(err), want, "%d bytes: %v", size, err)
		}
	})
}

// Each open call of a connection takes goroutines and memory of the server, so their number is
// bounded.
func TestTheCallsOfAConnectionAreBounded(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		dial, stop := serving(t)
		defer stop()
		conn, _ := dial(t.Context(), "")
		defer conn.Close()
		frame := make([]byte, 9+6*16) // a header and settings
		n := testkit.Result(io.ReadAtLeast(conn, frame, 9)).Must(t)
		length, kind := int(frame[0])<<16|int(frame[1])<<8|int(frame[2]), frame[3]
		if kind != 4 || length > len(frame)-9 {
			t.Fatalf("the server begins with %x", frame[:n])
		}
		if n < 9+length {
			_ = testkit.Result(io.ReadFull(conn, frame[n:9+length])).Must(t)
		}
		got := uint32(0)
		for s := frame[9 : 9+length]; len(s) > 0; s = s[6:] {
			if binary.BigEndian.Uint16(s) == 3 { // SETTINGS_MAX_CONCURRENT_STREAMS
				got = binary.BigEndian.Uint32(s[2:])
			}
		}
		testkit.Equal(t, got, service.MaxStreams, "streams")
	})
}

// counted is a connection that is counted while open.
type counted struct {
	net.Conn
	closed func()
}

func (c counted) Close() error {
	c.closed()
	return c.Conn.Close()
}
