package lifecycle

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/srtm-io/srtm/internal/testkit"
)

// These tests run on virtual time over in-memory listeners, because a TCP listener would stop the
// clock.

func inMemory() *bufconn.Listener { return bufconn.Listen(1 << 16) }

func dialer(ln *bufconn.Listener) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return ln.DialContext(ctx) },
		DisableKeepAlives: true,
	}}
}

// fetch gets a page and returns the answer, or "cut off".
func fetch(client *http.Client) string {
	resp, err := client.Get("http://server/")
	if err != nil {
		return "cut off"
	}
	body, err := io.ReadAll(resp.Body)
	if err := errors.Join(err, resp.Body.Close()); err != nil {
		return "cut off"
	}
	return string(body)
}

// Bounds the cost of a client that sends or reads nothing, or too much.
func TestHTTPClientsThatHoldUp(t *testing.T) {
	for _, c := range []struct{ name, says, want string }{
		{"nothing", "", ""},
		{"half a header", "GET / HTTP/1.1\r\nHost: ", ""},
		{"a huge header", "GET / HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", 100_000), " 431 "},
		{"no body", "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n", " 200 "},
		{"a body without end", "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n", " 200 "},
		{"no body after 100", "POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n", " 200 "},
		{"nothing more", "GET / HTTP/1.1\r\nHost: x\r\n\r\n", " 200 "},
	} {
		t.Run(c.name, func(t *testing.T) {
			testkit.Bubble(t, func(t *testing.T) {
				ln := inMemory()
				ctx, stop := context.WithCancel(t.Context())
				stopped := make(chan error, 1)
				server := HTTP(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), slog.New(slog.DiscardHandler))
				go func() { stopped <- Serve(ln, server)(ctx) }()
				nc := testkit.Result(ln.DialContext(t.Context())).Must(t)
				began := time.Now()
				go func() { _, _ = io.WriteString(nc, c.says) }() // the server refuses the unread rest
				testkit.Must(t, nc.SetReadDeadline(began.Add(time.Hour)))
				answer, _ := io.ReadAll(nc)
				if took := time.Since(began); took > 2*time.Minute {
					t.Errorf("the connection is open after %v", took)
				}
				if !strings.Contains(string(answer), c.want) || c.want == "" && len(answer) > 0 {
					t.Errorf("%q", answer)
				}
				nc.Close()
				stop()
				testkit.Must(t, <-stopped)
			})
		})
	}
}

func TestServeLetsRequestsFinish(t *testing.T) {
	for _, c := range []struct {
		name        string
		takes, stop time.Duration // duration of the request; duration of the stop
		answer      string
	}{
		{"in time", Grace - time.Millisecond, Grace - time.Millisecond, "done"},
		{"never", time.Hour, Grace, "cut off"},
		{"as long as it may by then", time.Minute, time.Minute, "done"},
	} {
		t.Run(c.name, func(t *testing.T) {
			testkit.Bubble(t, func(t *testing.T) {
				ln := inMemory()
				asked := make(chan struct{})
				srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					close(asked)
					select {
					case <-time.After(c.takes):
					case <-r.Context().Done(): // before the client's connection is closed
						panic(http.ErrAbortHandler)
					}
					_, _ = io.WriteString(w, "done")
				})}
				ctx, cancel := context.WithCancel(t.Context())
				var stopped, cancelled time.Time
				ended := make(chan error, 1)
				grace := Grace
				go func() {
					err := ServeWithin(ln, srv, func() time.Duration { return grace })(ctx)
					stopped = time.Now()
					ended <- err
				}()
				answer := make(chan string, 1)
				go func() { answer <- fetch(dialer(ln)) }()
				<-asked
				if c.stop > grace {
					grace = time.Hour // a change during serving
				}
				cancelled = time.Now()
				cancel()
				testkit.Equal(t, <-answer, c.answer, "answer")
				if err := <-ended; err != nil {
					t.Errorf("a clean stop: %v", err)
				}
				// Shutdown polls at intervals of at most half a second plus a tenth.
				if took := stopped.Sub(cancelled); took < c.stop || took > c.stop+time.Second {
					t.Errorf("stopped after %v, want %v", took, c.stop)
				}
				if _, err := ln.Dial(); err == nil {
					t.Error("the listener is still open")
				}
			})
		})
	}
}

func TestServeReportsABrokenListener(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		ln := inMemory()
		testkit.Must(t, ln.Close())
		err := Serve(ln, &http.Server{})(t.Context())
		if err == nil || !strings.HasPrefix(err.Error(), "serve HTTP on bufconn: ") {
			t.Errorf("%v; want the listener named", err)
		}
		err = ServeGRPC(ln, grpc.NewServer())(t.Context())
		if err == nil || !strings.HasPrefix(err.Error(), "serve gRPC on bufconn: ") {
			t.Errorf("%v; want the listener named", err)
		}
	})
}

func TestServeGRPCEndsStreamsThatDoNotEnd(t *testing.T) {
	for _, c := range []struct {
		name string
		ends bool // the client ends its stream when it learns of the stop
		stop time.Duration
	}{{"they end", true, 0}, {"they do not", false, Grace}} {
		t.Run(c.name, func(t *testing.T) {
			testkit.Bubble(t, func(t *testing.T) {
				ln := inMemory()
				srv := grpc.NewServer()
				healthpb.RegisterHealthServer(srv, health.NewServer())
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan error, 1)
				go func() { ended <- ServeGRPC(ln, srv)(ctx) }()

				conn, err := grpc.NewClient("passthrough:///server", grpc.WithTransportCredentials(insecure.NewCredentials()),
					grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return ln.DialContext(ctx) }))
				testkit.Must(t, err)
				watching, stopWatching := context.WithCancel(t.Context())
				defer stopWatching()
				stream := testkit.Result(healthpb.NewHealthClient(conn).Watch(watching, &healthpb.HealthCheckRequest{})).Must(t)
				testkit.Result(stream.Recv()).Must(t)
				cancelled := time.Now()
				cancel()
				if c.ends {
					stopWatching()
				}
				_, err = stream.Recv()
				want := codes.Unavailable
				if c.ends {
					want = codes.Canceled
				}
				if status.Code(err) != want {
					t.Errorf("the stream ended with %v, want %v", err, want)
				}
				if err := <-ended; err != nil {
					t.Errorf("a clean stop: %v", err)
				}
				testkit.Equal(t, time.Since(cancelled), c.stop, "stopped after")
				testkit.NoError(t, conn.Close())
			})
		})
	}
}

func TestPartsTogether(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		broken := errors.New("broken")
		ended := 0
		err := Together(
			func(ctx context.Context) error { <-ctx.Done(); pass(time.Second); ended++; return nil },
			func(context.Context) error { pass(time.Minute); return broken },
		)(t.Context())
		if !errors.Is(err, broken) || ended != 1 {
			t.Errorf("%v, %d parts were waited for", err, ended)
		}
		began := time.Now()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		slow := func(ctx context.Context) error { <-ctx.Done(); pass(time.Second); return nil }
		if err := Together(slow, slow, slow)(ctx); err != nil || time.Since(began) != time.Second {
			t.Errorf("%v after %v; want all to stop at the same time", err, time.Since(began))
		}
	})
}
