package targets

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

	"github.com/srtm-io/srtm/internal/bidi"
)

// Ports that SRTM's daemons listen at by default.
const (
	LoaddistributorPort = "4170" // gRPC
	TBAdaptorPort       = "4180" // gRPC
	AgentHTTPPort       = "4190" // of srtm agent
	AdmissionPort       = "4192" // gRPC
	AdmissionUDPPort    = "4193"
	GatewayAdminPort    = "4196" // HTTP
	NSQPort             = "4150" // TCP, of nsqd
	NSQHTTPPort         = "4151" // of nsqd
	NSQLookupdPort      = "4160" // TCP, of loaddistributor
	LookupPort          = "4161" // HTTP, of loaddistributor
)

// WithPort returns a list of addresses with commas in which each host without a port has this
// one. URLs and paths of sockets stay as they are.
func WithPort(list, port string) string {
	all := Split(list)
	for i, address := range all {
		if address == "" || port == "" || strings.Contains(address, "/") {
			continue
		}
		if _, _, err := net.SplitHostPort(address); err == nil {
			continue
		}
		host := strings.TrimSuffix(strings.TrimPrefix(address, "["), "]")
		if strings.Contains(host, ":") && net.ParseIP(host) == nil {
			continue // whoever connects says that it is no address
		}
		all[i] = net.JoinHostPort(host, port)
	}
	return strings.Join(all, ",")
}

// Split returns the addresses of a list with commas.
func Split(list string) []string { return strings.Split(list, ",") }

// Dial returns a connection to one of the addresses, which looks for another
// when it breaks, and, during a call, when the server's host is gone. It connects
// when it is first needed.
func Dial(list string, options ...grpc.DialOption) (*grpc.ClientConn, error) {
	options = append([]grpc.DialOption{
		bidi.Receive(),
		// Ten seconds is the minimum that gRPC allows a client. Who sends notices a dead host
		// sooner: with keepalive set, gRPC gives up a connection whose bytes stay
		// unacknowledged for Timeout.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 3 * time.Second}),
	}, options...)
	all := Split(list)
	if len(all) == 1 {
		return grpc.NewClient(list, options...)
	}
	var state resolver.State
	for _, address := range all {
		// Each has a certificate of its own host's.
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

// Keep is Dial for a server that needs the other one for as long as it runs. It tries to connect
// again soon after a failure, and after that at least once in wait.
func Keep(list string, wait time.Duration, options ...grpc.DialOption) (*grpc.ClientConn, error) {
	return Dial(list, append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()), // if options say nothing else
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: wait},
			MinConnectTimeout: min(wait, 2*time.Second),
		}),
	}, options...)...)
}

// notLeader is the reason, in an error's ErrorInfo, of a server that does not
// lead, and leaderKey where it says who does.
const (
	notLeader = "NOT_LEADER"
	leaderKey = "leader"
)

// Leader reports whether err is the answer of a server that does not lead, and
// who does, if it knows.
func Leader(err error) (address string, elsewhere bool) {
	if info := Info(err); info.GetReason() == notLeader {
		return info.Metadata[leaderKey], true
	}
	return "", false
}

// Reason returns that of an error's ErrorInfo, or nothing.
func Reason(err error) string { return Info(err).GetReason() }

// Info returns the ErrorInfo of a gRPC error; nil: it has none.
func Info(err error) *errdetails.ErrorInfo {
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok {
			return info
		}
	}
	return nil
}
