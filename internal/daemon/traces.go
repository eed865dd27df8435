package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	"go.opentelemetry.io/otel/sdk/trace"
	oteltrace "go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/stats"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/program"
)

// tracesFlush bounds the wait for the last traces when a daemon stops.
const tracesFlush = 2 * time.Second

// checkTraces returns an error for an invalid --trace-endpoint.
func checkTraces(endpoint string) error {
	u, err := url.Parse(endpoint)
	if endpoint == "" || err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Port() != "" {
		return nil
	}
	return fmt.Errorf("--trace-endpoint %q: want http://host:port, or https://host:port", endpoint)
}

// traces makes a gRPC server trace its calls, except session-long calls and health
// checks. end sends the last traces. Unsendable traces are dropped.
func traces(ctx context.Context, endpoint, name string, log *slog.Logger) (_ grpc.ServerOption, _ oteltrace.TracerProvider, end func(), err error) {
	exporter, err := otlptracegrpc.New(ctx, otlptracegrpc.WithEndpointURL(endpoint))
	if err != nil {
		return nil, nil, nil, fmt.Errorf("--trace-endpoint: %w", err)
	}
	sparse, _ := obs.Sparse(log)
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) {
		sparse.Warn("traces were not sent", obs.KeyError, err)
	}))
	provider := trace.NewTracerProvider(trace.WithBatcher(exporter), trace.WithResource(resource.NewSchemaless(
		attribute.String("service.name", name), attribute.String("service.version", program.Release))))
	handler := otelgrpc.NewServerHandler(
		otelgrpc.WithTracerProvider(provider), otelgrpc.WithMeterProvider(noop.NewMeterProvider()), otelgrpc.WithPropagators(propagation.TraceContext{}),
		otelgrpc.WithMessageEvents(otelgrpc.SentEvents), // a creation sends each of its states
		otelgrpc.WithFilter(func(call *stats.RPCTagInfo) bool { return traced(call.FullMethodName) }),
	)
	return grpc.StatsHandler(handler), provider, func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), tracesFlush)
		defer cancel()
		if err := provider.Shutdown(ctx); err != nil {
			log.Warn("the last traces were not sent", obs.KeyError, err)
		}
	}, nil
}

// traced reports whether a method's calls are traced.
func traced(method string) bool {
	service, call, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/")
	return strings.HasPrefix(service, "srtm.") && call != "Session" && call != "Watch" && call != "Replicate"
}
