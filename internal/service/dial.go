package service

import (
	"fmt"
	"net"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"
)

// Default ports of SRTM's daemons.
const (
	LoaddistributorPort = "4170" // gRPC
	TBAdaptorPort       = "4180" // gRPC
	AgentHTTPPort       = "4190" // HTTP, of srtm agent
	AdmissionPort       = "4192" // gRPC
	AdmissionUDPPort    = "4193"
	GatewayAdminPort    = "4196" // HTTP
	NSQPort             = "4150" // TCP, of nsqd
	MQTTPort            = "1883" // TCP, of nsqd
	NSQHTTPPort         = "4151" // HTTP, of nsqd
	NSQLookupdPort      = "4160" // TCP, of loaddistributor
	LookupPort          = "4161" // HTTP, of loaddistributor
)

// WithPort returns a comma-separated list of addresses in which each host without a port has port. URLs
// and socket paths stay unchanged.
func WithPort(list, port string) string {
	all := SplitAddresses(list)
	for i, address := range all {
		if address == "" || port == "" || strings.Contains(address, "/") {
			continue
		}
		if _, _, err := net.SplitHostPort(address); err == nil {
			continue
		}
		host := strings.TrimSuffix(strings.TrimPrefix(address, "["), "]")
		if strings.Contains(host, ":") && net.ParseIP(host) == nil {
			continue // no address: the dial will fail
		}
		all[i] = net.JoinHostPort(host, port)
	}
	return strings.Join(all, ",")
}

// SplitAddresses returns the addresses of a comma-separated list.
func SplitAddresses(list string) []string { return strings.Split(list, ",") }

// Dial returns a connection to one of the addresses. The connection is established at its first
// use. When the connection breaks, or during a call when the server's host is gone, gRPC tries the
// other addresses.
func Dial(list string, options ...grpc.DialOption) (*grpc.ClientConn, error) {
	options = append([]grpc.DialOption{
		SessionOption(),
		// By default gRPC also requests a TXT record from the name server, and connects after the answer. A name
		// server of containers without a route to the world answers such questions after 20 s.
		grpc.WithDisableServiceConfig(),
		// Ten seconds is the minimum that gRPC allows a client. A client that sends notices a dead host
		// sooner: with keepalive set, gRPC closes a connection whose bytes stay unacknowledged for
		// Timeout.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 3 * time.Second}),
	}, options...)
	all := SplitAddresses(list)
	if len(all) == 1 {
		return grpc.NewClient(list, options...)
	}
	var state resolver.State
	for _, address := range all {
		// Each server has a certificate for its own host.
		host, _, err := net.SplitHostPort(address)
		if err != nil {
			return nil, fmt.Errorf("%q is not a host:port: %w", address, err)
		}
		state.Endpoints = append(state.Endpoints, resolver.Endpoint{Addresses: []resolver.Address{{Addr: address, ServerName: host}}})
	}
	m := manual.NewBuilderWithScheme("several")
	m.InitialState(state)
	return grpc.NewClient("several:///"+all[0], append(options, grpc.WithResolvers(m))...)
}

// Keep is Dial for a process that needs the server as long as the process runs. After a failure the
// connection tries again soon, and then at least once in wait.
func Keep(list string, wait time.Duration, options ...grpc.DialOption) (*grpc.ClientConn, error) {
	return Dial(list, append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()), // options may override the credentials
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: wait},
			MinConnectTimeout: min(wait, 2*time.Second),
		}),
	}, options...)...)
}

// notLeader is the reason in the ErrorInfo of a server that does not lead. leaderKey is the metadata
// key of the leader's address.
const (
	notLeader = "NOT_LEADER"
	leaderKey = "leader"
)

// Leader reports whether err comes from a server that does not lead, and returns the leader's address
// if the server knows it.
func Leader(err error) (address string, elsewhere bool) {
	if info := Info(err); info.GetReason() == notLeader {
		return info.Metadata[leaderKey], true
	}
	return "", false
}

// Reason returns the reason in the ErrorInfo of err; "": none.
func Reason(err error) string { return Info(err).GetReason() }

// Info returns the ErrorInfo of a gRPC error; nil: none.
func Info(err error) *errdetails.ErrorInfo {
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok {
			return info
		}
	}
	return nil
}
