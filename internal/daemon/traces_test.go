package daemon

import (
	"context"
	"flag"
	"log/slog"
	"sync"
	"testing"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	otlp "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
)

// spans is a collector of OTLP.
type spans struct {
	collector.UnimplementedTraceServiceServer
	mu       sync.Mutex
	all      []*otlp.Span
	services []string
}

func (s *spans) Export(_ context.Context, r *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, resource := range r.ResourceSpans {
		for _, a := range resource.Resource.Attributes {
			if a.Key == "service.name" {
				s.services = append(s.services, a.Value.GetStringValue())
			}
		}
		for _, scope := range resource.ScopeSpans {
			s.all = append(s.all, scope.Spans...)
		}
	}
	return &collector.ExportTraceServiceResponse{}, nil
}

type topics struct {
	srtmv1.UnimplementedAdminServiceServer
}

func (topics) ListTopics(context.Context, *srtmv1.ListTopicsRequest) (*srtmv1.ListTopicsResponse, error) {
	return &srtmv1.ListTopicsResponse{}, nil
}

func (topics) DeleteTopic(context.Context, *srtmv1.DeleteTopicRequest) (*srtmv1.DeleteTopicResponse, error) {
	return nil, status.Error(codes.Internal, "broken")
}

// served runs a daemon with flags and calls use meanwhile.
func served(t *testing.T, use func(*grpc.ClientConn), flags ...string) {
	t.Helper()
	a := Addresses{GRPC: "127.0.0.1:0", HTTP: "127.0.0.1:0"}
	fs := flag.NewFlagSet("thing", flag.ContinueOnError)
	for _, g := range a.Groups("", "") {
		g.Flags(fs)
	}
	testkit.Must(t, fs.Parse(flags))
	testkit.Must(t, a.Validate())
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	up, ended := make(chan string, 1), make(chan error, 1)
	go func() {
		ended <- a.Serve(ctx, "thing", slog.New(slog.DiscardHandler), nil, func(s *Servers) error {
			srtmv1.RegisterAdminServiceServer(s.GRPC, topics{})
			s.AddServers()
			up <- s.RPCListener.Addr().String()
			return nil
		})
	}()
	conn := testkit.Result(grpc.NewClient(<-up, grpc.WithTransportCredentials(insecure.NewCredentials()))).Must(t)
	use(conn)
	conn.Close()
	stop()
	testkit.Must(t, <-ended)
}

func TestTraces(t *testing.T) {
	got := &spans{}
	server := grpc.NewServer()
	collector.RegisterTraceServiceServer(server, got)
	address := testkit.Serve(t, server)
	use := func(conn *grpc.ClientConn) {
		admin := srtmv1.NewAdminServiceClient(conn)
		const parent = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
		ctx := metadata.AppendToOutgoingContext(t.Context(), "traceparent", parent)
		_, err := admin.ListTopics(ctx, &srtmv1.ListTopicsRequest{}, grpc.WaitForReady(true))
		testkit.NoError(t, err)
		if _, err := admin.DeleteTopic(t.Context(), &srtmv1.DeleteTopicRequest{}); err == nil {
			t.Error("no error")
		}
		_, err = healthv1.NewHealthClient(conn).Check(t.Context(), &healthv1.HealthCheckRequest{})
		testkit.NoError(t, err)
	}
	served(t, use) // off: nothing is sent
	served(t, use, "--trace-endpoint=http://"+address)
	// A daemon that stops does not wait for ever until its spans are accepted.
	testkit.WaitFor(t, "both spans", func() bool {
		got.mu.Lock()
		defer got.mu.Unlock()
		return len(got.all) >= 2
	})
	server.Stop() // nothing more comes
	if len(got.all) != 2 || got.services[0] != "thing" {
		t.Fatalf("%d spans of %q: %v", len(got.all), got.services, got.all)
	}
	for _, span := range got.all {
		switch span.Name {
		case "srtm.v1.AdminService/ListTopics":
			if string(span.TraceId) != "\x01\x23\x45\x67\x89\xab\xcd\xef\x01\x23\x45\x67\x89\xab\xcd\xef" || span.Status.GetCode() == otlp.Status_STATUS_CODE_ERROR {
				t.Errorf("%v", span)
			}
		case "srtm.v1.AdminService/DeleteTopic":
			if span.Status.GetCode() != otlp.Status_STATUS_CODE_ERROR || span.EndTimeUnixNano < span.StartTimeUnixNano {
				t.Errorf("%v", span)
			}
		default:
			t.Errorf("a span of %s", span.Name)
		}
	}
}

// Nothing listens where traces are to go: the daemon serves, and ends.
func TestTracesThatCannotBeSent(t *testing.T) {
	served(t, func(conn *grpc.ClientConn) {
		_, err := srtmv1.NewAdminServiceClient(conn).ListTopics(t.Context(), &srtmv1.ListTopicsRequest{}, grpc.WaitForReady(true))
		testkit.NoError(t, err)
	}, "--trace-endpoint=http://127.0.0.1:1")
}

func TestTraceEndpoint(t *testing.T) {
	for endpoint, good := range map[string]bool{"": true, "http://h:4317": true, "https://h:4317": true, "h:4317": false, "http://h": false, "ftp://h:1": false} {
		if err := checkTraces(endpoint); (err == nil) != good {
			t.Errorf("%q: %v", endpoint, err)
		}
	}
}
