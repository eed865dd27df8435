package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/test/bufconn"

	"github.com/srtm-io/srtm/console"
	"github.com/srtm-io/srtm/internal/daemon"
	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/loaddistributor/controller"
)

// Prefixes of the flags for the console's credentials: at the brokers' HTTP, at admission's servers and
// at gateways.
const (
	brokersPrefix   = "console-"
	admissionPrefix = "console-admission-"
	gatewayPrefix   = "console-gateway-"
)

// maxPeers is the maximum number of admission's servers, and of gateways, that the console shows.
const maxPeers = 32

// checkPeers checks the addresses of a flag.
func checkPeers(name string, addresses []string) error {
	if len(addresses) > maxPeers {
		return fmt.Errorf("--%s: %d addresses, at most %d", name, len(addresses), maxPeers)
	}
	for _, address := range addresses {
		if _, _, err := controller.HostPort(address); err != nil {
			return fmt.Errorf("--%s: %w", name, err)
		}
	}
	return nil
}

// addConsole serves the web console. The console calls the API as other programs do, but through a pipe
// within the process. The console authorizes its users by the same tokens. shares is a connection to
// the GrantService; nil: the API has the GrantService.
func (o *options) addConsole(s *daemon.Servers, log *slog.Logger, shares grpc.ClientConnInterface, register func(grpc.ServiceRegistrar)) error {
	pipe := bufconn.Listen(64 << 10)
	inner := grpc.NewServer(grpc.ChainUnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		return next(called(ctx), req)
	}, secure.TenantUnary), grpc.ChainStreamInterceptor(func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
		return next(srv, calledStream{stream, called(stream.Context())})
	}, secure.TenantStream))
	register(inner)
	conn, err := grpc.NewClient("passthrough:console", service.SessionOption(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return pipe.DialContext(ctx) }))
	if err != nil {
		return fmt.Errorf("console: %w", err)
	}
	if shares == nil {
		shares = conn
	}
	peers := map[string]grpc.ClientConnInterface{}
	closeAll := conn.Close
	for _, address := range o.admissionAddresses {
		peer, err := dial(address, o.admissionOptions)
		if err != nil {
			return errors.Join(fmt.Errorf("--console-admission-address: %w", err), closeAll())
		}
		peers[address] = peer
		previous := closeAll
		closeAll = func() error { return errors.Join(previous(), peer.Close()) }
	}
	pages, err := console.New(console.Config{
		Admission: peers, Gateways: o.gatewayAddresses, Gateway: o.gateways,
		API: conn, Shares: shares, Brokers: o.brokers, May: o.addresses.Guard.May, CallerName: secure.CallerName, Tenant: o.addresses.Guard.Tenant,
		Lookup: console.InProcess(s.Mux), Hosts: o.consoleHosts, Metrics: s.Metrics, Log: log,
	})
	if err != nil {
		return err
	}
	s.Pages, s.PagesAt = pages, console.Prefix
	s.Group.Add("console API", lifecycle.ServeGRPC(pipe, inner))
	s.Group.Add("console", func(ctx context.Context) error {
		return errors.Join(pages.Run(ctx), closeAll())
	})
	return nil
}

// called returns a context of the inner server with the caller and the tenant that the console sends.
// Other servers do not accept this metadata.
func called(ctx context.Context) context.Context {
	if callers := metadata.ValueFromIncomingContext(ctx, console.CallerKey); len(callers) == 1 {
		ctx = secure.WithCaller(ctx, callers[0])
	}
	if tenants := metadata.ValueFromIncomingContext(ctx, console.TenantKey); len(tenants) == 1 {
		ctx = secure.WithTenant(ctx, tenants[0])
	}
	return ctx
}

type calledStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s calledStream) Context() context.Context { return s.ctx }

// transport returns a transport for HTTP requests with the credentials of flags that begin with prefix.
// With TLS the transport may also send a token.
func transport(prefix string, c secure.ClientConfig) (http.RoundTripper, error) {
	cfg, err := c.TLS(prefix)
	token, unread := c.Token(prefix)
	if c.TokenFile != "" && c.CAFile == "" {
		unread = errors.Join(unread, fmt.Errorf("--%[1]stoken-file: needs --%[1]stls-ca: a token is not sent in clear", prefix))
	}
	if err := errors.Join(err, unread); err != nil {
		return nil, err
	}
	t := &http.Transport{TLSClientConfig: cfg, ResponseHeaderTimeout: 5 * time.Second, IdleConnTimeout: 30 * time.Second, MaxIdleConnsPerHost: 2}
	scheme := "http"
	if cfg != nil {
		scheme = "https"
	}
	return roundTrip{t, scheme, token}, nil
}

type roundTrip struct {
	*http.Transport
	scheme string
	token  secure.Bearer // nil: none
}

func (t roundTrip) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.URL.Scheme = t.scheme
	if t.token != nil {
		r.Header.Set("Authorization", "Bearer "+t.token())
	}
	return t.Transport.RoundTrip(r)
}
