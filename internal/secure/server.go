package secure

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/tap"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/bounded"
	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/service"
)

// Flags is a flag set of the standard library or of pflag.
type Flags interface {
	StringVar(p *string, name, value, usage string)
	BoolVar(p *bool, name string, value bool, usage string)
}

// ServerConfig selects a server's identity and its clients. The zero value serves all
// clients without TLS.
type ServerConfig struct {
	CertFile, KeyFile string // PEM; both or neither
	ClientCAFile      string // PEM: clients must show a certificate of these authorities
	CRLFile           string // PEM: revoked certificates of these authorities
	TokenFile         string // clients must show one of these tokens, or certificates
	HTTPTLS           bool   // HTTP with TLS too
	HTTPOnly          bool   // no gRPC: with a certificate HTTP has TLS
	Force             string // from Insecure: listeners allowed beyond loopback without security
}

// Insecure adds a value of --allow-insecure-listen to soFar: "true" for all of a
// program's listeners, "false" for none, or the names of their flags, separated by
// commas.
func Insecure(soFar, value string, listeners ...string) (string, error) {
	switch value {
	case "true":
		return value, nil
	case "false":
		return "", nil
	}
	for name := range strings.SplitSeq(value, ",") {
		if !slices.Contains(listeners, name) {
			return "", fmt.Errorf("%q is none of %s", name, strings.Join(listeners, ", "))
		}
	}
	return soFar + "," + value, nil
}

// Flags adds the flags of a server of gRPC and HTTP with these listeners.
func (c *ServerConfig) Flags(fs *flag.FlagSet, listeners ...string) {
	c.flags(fs, "gRPC with TLS", listeners)
	fs.BoolVar(&c.HTTPTLS, "http-tls", false, "serve HTTP with the same TLS")
}

// HTTPFlags is Flags for a server of HTTP alone.
func (c *ServerConfig) HTTPFlags(fs *flag.FlagSet, listeners ...string) {
	c.HTTPOnly = true
	c.flags(fs, "HTTP with TLS, and HTTP/2", listeners)
}

func (c *ServerConfig) flags(fs *flag.FlagSet, what string, listeners []string) {
	fs.StringVar(&c.CertFile, "tls-cert", "", "PEM `file` of the certificate: "+what)
	fs.StringVar(&c.KeyFile, "tls-key", "", "PEM `file` of its key")
	fs.StringVar(&c.ClientCAFile, "tls-client-ca", "", "PEM `file` of the authorities whose certificates clients must present")
	fs.StringVar(&c.CRLFile, "tls-crl", "", "PEM `file` of lists of client certificates that are revoked, signed by the authorities of --tls-client-ca; read again at SIGHUP, which ends their connections")
	fs.StringVar(&c.TokenFile, "token-file", "", "`file` of permissions: lines of a role (read-only, node, admin), then a token or cert:NAME of a client certificate, and for a node its broker id (default any), for others their tenant (default the certificate's organisation)")
	fs.BoolFunc("allow-insecure-listen", "listen beyond loopback without TLS, or without client certificates or tokens: `which` of "+strings.Join(listeners, ",")+" (without a value all)", func(value string) (err error) {
		c.Force, err = Insecure(c.Force, value, listeners...)
		return err
	})
}

// Server is a loaded ServerConfig. Changed certificates, authorities and tokens are read
// again. Existing connections stay.
type Server struct {
	// Set by Load.
	tls     *ServerTLS // nil: no TLS
	mutual  bool       // clients show certificates
	tokens  *Tokens    // nil: clients need none
	httpTLS bool
	log     *atomic.Pointer[slog.Logger]

	auditor atomic.Pointer[Auditor] // nil until Log

	lastLogged atomic.Int64 // time of the last log line about a failed handshake, in Unix seconds
}

// Load reads the files, or returns all problems.
func (c ServerConfig) Load() (*Server, error) {
	s := &Server{httpTLS: c.httpTLS(), mutual: c.ClientCAFile != "", log: &atomic.Pointer[slog.Logger]{}}
	var f faults.List
	var err error
	certificate := c.CertFile != "" || c.KeyFile != ""
	f.If((c.CertFile == "") != (c.KeyFile == ""), "--tls-cert and --tls-key: want both or neither")
	f.If(!certificate && c.ClientCAFile != "", "--tls-client-ca needs --tls-cert")
	f.If(!certificate && c.HTTPTLS, "--http-tls needs --tls-cert")
	f.If(c.CRLFile != "" && c.ClientCAFile == "", "--tls-crl needs --tls-client-ca")
	if c.CertFile != "" && c.KeyFile != "" {
		s.tls, err = loadTLS(s.log, c.readTLS, c.CertFile, c.KeyFile, c.ClientCAFile)
		f.Add(err)
	} else if c.ClientCAFile != "" {
		_, err = c.readPool()
		f.Add(err)
	}
	if c.CRLFile != "" && c.ClientCAFile != "" {
		if s.tls != nil {
			f.Add(s.tls.Revoke("--tls-crl", c.CRLFile, c.ClientCAFile))
		} else if _, err := c.readPool(); err == nil {
			_, err = readRevocations(c.CRLFile, c.ClientCAFile)
			f.If(err != nil, "--tls-crl: %w", err)
		}
	}
	if c.TokenFile != "" {
		s.tokens, err = loadTokens(s.log, "--token-file", c.TokenFile)
		f.Add(err)
	}
	if err := f.Err(); err != nil {
		return nil, err
	}
	return s, nil
}

// httpTLS reports whether HTTP has TLS.
func (c ServerConfig) httpTLS() bool { return c.HTTPTLS || c.HTTPOnly && c.CertFile != "" }

// Log sets the logger for reloads, their failures, and operators' actions.
func (s *Server) Log(log *slog.Logger) {
	s.log.Store(log)
	s.auditor.Store(NewAuditor(log, s.tokens != nil))
}

// Measure registers Expiry if there is TLS.
func (s *Server) Measure(metrics prometheus.Registerer) {
	if s.tls != nil {
		metrics.MustRegister(s.tls.Expiry())
	}
}

// HTTPTLS reports whether HTTP has TLS.
func (s *Server) HTTPTLS() bool { return s.httpTLS }

// Tokens returns the tokens of the token file; nil without one.
func (s *Server) Tokens() *Tokens { return s.tokens }

// readTLS reads the certificate, its key, and the clients' authorities.
func (c ServerConfig) readTLS() (*tls.Config, error) {
	cfg := &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"h2", "http/1.1"}}
	var errs []error
	pair, err := tls.LoadX509KeyPair(c.CertFile, c.KeyFile)
	if err != nil {
		errs = append(errs, fmt.Errorf("--tls-cert, --tls-key: %w", err))
	}
	cfg.Certificates = []tls.Certificate{pair}
	if c.ClientCAFile != "" {
		if cfg.ClientCAs, err = c.readPool(); err != nil {
			errs = append(errs, err)
		}
		cfg.ClientAuth = tls.RequireAndVerifyClientCert
	}
	return cfg, errors.Join(errs...)
}

// ServerTLS is a server's TLS configuration, reloaded when its files change. Each
// configuration has one certificate.
type ServerTLS struct {
	config *fresh[*tls.Config]
	lives  *lifetimes
}

// Log sets the log of changes of the files.
func (t *ServerTLS) Log(log *slog.Logger) { t.config.Log(log) }

// LoadTLS calls read now and after each change of the files.
func LoadTLS(read func() (*tls.Config, error), files ...string) (*ServerTLS, error) {
	return loadTLS(&atomic.Pointer[slog.Logger]{}, read, files...)
}

func loadTLS(log *atomic.Pointer[slog.Logger], read func() (*tls.Config, error), files ...string) (*ServerTLS, error) {
	f, err := newFresh(log, read, files...)
	if err != nil {
		return nil, err
	}
	return &ServerTLS{f, &lifetimes{log: f.log}}, nil
}

// Revoke makes the server refuse certificates that the lists in crlFile revoke. The
// authorities in caFile must have signed the lists. flag names crlFile in errors. Call
// Revoke before Config.
func (t *ServerTLS) Revoke(flag, crlFile, caFile string) error {
	crls, err := newFresh(t.config.log, func() (*revocations, error) {
		lists, err := readRevocations(crlFile, caFile)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", flag, err)
		}
		return lists, nil
	}, crlFile, caFile)
	if err != nil {
		return err
	}
	t.lives.crls = crls
	OnReadAgain(t.lives.readAgain)
	return nil
}

// Hold calls end when the certificate of a connection's client expires or is revoked,
// unless release is called before. It is for connections that do not come from a bounded.Listener,
// because Config ends the listener's connections itself.
func (t *ServerTLS) Hold(state tls.ConnectionState, remote string, end func()) (release func()) {
	return t.lives.watch(state, remote, end)
}

// Expiry returns a metric. Collecting the metric also checks the files.
func (t *ServerTLS) Expiry() prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "srtm_tls_certificate_expiry_timestamp_seconds", Help: "When the server's TLS certificate expires, in Unix seconds.",
	}, func() float64 { return float64(t.config.get().Certificates[0].Leaf.NotAfter.Unix()) })
}

// Config returns a configuration that uses the present files at each handshake. A
// connection of a bounded.Listener ends with the client's certificate.
func (t *ServerTLS) Config() *tls.Config {
	return &tls.Config{GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		cfg := t.config.get()
		if cfg.ClientAuth == tls.NoClientCert {
			return cfg, nil
		}
		cfg = cfg.Clone()
		cfg.VerifyConnection = func(state tls.ConnectionState) error {
			if err := t.lives.verify(state); err != nil {
				return err
			}
			if conn := accepted(hello.Conn); conn != nil {
				conn.Then(t.lives.watch(state, conn.RemoteAddr().String(), func() { conn.Close() }))
			}
			return nil
		}
		return cfg, nil
	}}
}

// accepted returns the accepted connection below c; nil if no bounded.Listener accepted it.
func accepted(c net.Conn) *bounded.Conn {
	for {
		switch below := c.(type) {
		case *bounded.Conn:
			return below
		case interface{ NetConn() net.Conn }:
			c = below.NetConn()
		default:
			return nil
		}
	}
}

func (c ServerConfig) readPool() (*x509.CertPool, error) {
	pool, err := readPool(c.ClientCAFile)
	if err != nil {
		return nil, fmt.Errorf("--tls-client-ca: %w", err)
	}
	return pool, nil
}

func readPool(path string) (*x509.CertPool, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%s: no certificate", path)
	}
	return pool, nil
}

// Identifies reports whether clients must authenticate. bounded then knows the gRPC
// connections with authenticated clients.
func (s *Server) Identifies() bool { return s.mutual || s.tokens != nil }

// identifies reports whether clients must authenticate.
func (c ServerConfig) identifies() bool { return c.ClientCAFile != "" || c.TokenFile != "" }

// CheckGRPC refuses a flag's address beyond loopback without TLS and either client
// certificates or tokens. It only checks which files are configured.
func (c ServerConfig) CheckGRPC(flag, address string) error {
	return c.Check(flag, address, c.CertFile != "" && c.identifies(),
		"--tls-cert and --tls-key, and --tls-client-ca or --token-file")
}

// CheckHTTP is CheckGRPC for HTTP.
func (c ServerConfig) CheckHTTP(flag, address string) error {
	tip := "--http-tls"
	if c.HTTPOnly {
		tip = "--tls-cert and --tls-key"
	}
	return c.Check(flag, address, c.httpTLS() && c.identifies(), tip+", and --tls-client-ca or --token-file")
}

// CheckPlain refuses an address beyond loopback of a protocol without TLS and tokens.
func (c ServerConfig) CheckPlain(flag, address string) error {
	return c.Check(flag, address, false, "")
}

// Check refuses a flag's address beyond loopback unless safe. want names the missing
// settings; empty: no setting makes it safe. The listener refuses an address that does
// not parse.
func (c ServerConfig) Check(flag, address string, safe bool, want string) error {
	tcp, err := net.ResolveTCPAddr("tcp", address)
	name := strings.TrimPrefix(flag, "--")
	forced := strings.Split(c.Force, ",")
	if address == "" || err != nil || safe || tcp.IP.IsLoopback() || slices.Contains(forced, "true") || slices.Contains(forced, name) {
		return nil
	}
	requirement := "which takes " + want
	if want == "" {
		requirement = "and this protocol has no TLS or tokens"
	}
	return fmt.Errorf("%s %s is beyond loopback, %s; --allow-insecure-listen=%s listens all the same", flag, address, requirement, name)
}

// Options returns the options of a gRPC server that serves only permitted clients.
func (s *Server) Options() []grpc.ServerOption {
	options := []grpc.ServerOption{grpc.ChainUnaryInterceptor(s.auditUnary, TenantUnary), grpc.ChainStreamInterceptor(s.auditStream, TenantStream)}
	if s.tls != nil {
		options = append(options, grpc.Creds(loggedCredentials{credentials.NewTLS(s.tls.Config()), s}))
	}
	if s.tokens != nil {
		options = append(options, grpc.InTapHandle(s.authorise), grpc.ChainStreamInterceptor(bind))
	}
	return options
}

// loggedCredentials logs failed handshakes, which gRPC does not log: at most one per second,
// because any peer can cause them.
type loggedCredentials struct {
	credentials.TransportCredentials
	s *Server
}

func (t loggedCredentials) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	secured, info, err := t.TransportCredentials.ServerHandshake(conn)
	if err == nil && t.s.mutual {
		bounded.Known(conn.RemoteAddr())
	}
	log, last, now := t.s.log.Load(), t.s.lastLogged.Load(), time.Now().Unix()
	if err == nil || errors.Is(err, io.EOF) || log == nil || last == now || !t.s.lastLogged.CompareAndSwap(last, now) {
		return secured, info, err
	}
	cause := err
	if errors.As(err, new(tls.RecordHeaderError)) {
		cause = fmt.Errorf("the client speaks in clear, and this port takes TLS: %w", err)
	}
	log.Warn("TLS handshake failed", obs.KeyRemote, conn.RemoteAddr().String(), obs.KeyError, cause)
	return secured, info, err
}

// authorise checks the caller when the headers of a call have arrived. An interceptor
// would run only after a request of many megabytes was read and decoded.
func (s *Server) authorise(ctx context.Context, call *tap.Info) (context.Context, error) {
	var header string
	if values := call.Header.Get("authorization"); len(values) > 0 {
		header = values[0]
	}
	may, problem, known := s.tokens.check(header, stateOf(ctx), needs(call.FullMethodName))
	if p, ok := peer.FromContext(ctx); ok && known {
		bounded.Known(p.Addr)
	}
	switch {
	case problem == "" && may.broker != "":
		return context.WithValue(ctx, boundKey{}, may.broker), nil
	case problem == "":
		return context.WithValue(ctx, tenantKey{}, may.tenant), nil
	}
	err := refused(codes.PermissionDenied, "PERMISSION_DENIED", problem)
	if !known {
		err = refused(codes.Unauthenticated, "UNAUTHENTICATED", problem)
	}
	if a := s.auditor.Load(); a != nil && audited(call.FullMethodName) {
		a.call(metadata.NewIncomingContext(ctx, call.Header), call.FullMethodName, nil, err, false)
	}
	return ctx, err
}

// boundKey is the context key of the one broker that a caller may be.
type boundKey struct{}

// bind refuses a hello of a broker other than the caller's.
func bind(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	broker, bound := stream.Context().Value(boundKey{}).(string)
	if !bound {
		return next(srv, stream)
	}
	return next(srv, examined{stream, func(m any) error {
		id := broker
		switch m := m.(type) {
		case *srtmv1.BrokerMessage:
			if m.GetHello() != nil {
				id = m.GetHello().BrokerId
			}
		case *srtmv1.NodeMessage:
			if m.GetHello() != nil {
				id = m.GetHello().BrokerId
			}
		}
		if id != broker {
			return refused(codes.PermissionDenied, "PERMISSION_DENIED", fmt.Sprintf("this is broker %s's token or certificate, not %.80q's", broker, id))
		}
		return nil
	}})
}

// examined is a stream that examines each received message.
type examined struct {
	grpc.ServerStream
	examine func(m any) error
}

func (h examined) RecvMsg(m any) error {
	if err := h.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	return h.examine(m)
}

func refused(code codes.Code, reason, text string) error {
	return service.CodedError(code, errors.New(text), &errdetails.ErrorInfo{Reason: reason, Domain: service.ErrorDomain})
}

// Listener returns ln, with TLS if HTTP has TLS.
func (s *Server) Listener(ln net.Listener) net.Listener {
	if !s.httpTLS {
		return ln
	}
	return tls.NewListener(ln, s.tls.Config())
}

// Handler returns next behind the token check. Requests that change something, and paths
// below /debug/, need Admin. Everything else needs ReadOnly, except /ping, /healthz and
// the open paths, which need no token.
func (s *Server) Handler(next http.Handler, open ...string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		need := needsHTTP(r)
		if need == ReadOnly && slices.Contains(open, r.URL.Path) {
			need = Unauthenticated
		}
		problem, known := s.May(r, need)
		if tenant := s.Tenant(r); problem == "" && need == Admin && tenant != "" {
			problem = operatorsOnly(tenant)
		}
		answer := next
		if problem != "" {
			answer = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				code := http.StatusForbidden
				if !known {
					w.Header().Set("WWW-Authenticate", "Bearer")
					code = http.StatusUnauthorized
				}
				http.Error(w, problem, code)
			})
		}
		if a := s.auditor.Load(); a != nil && need == Admin && r.Method != http.MethodGet {
			a.HTTP(w, r, problem != "", answer)
			return
		}
		answer.ServeHTTP(w, r)
	})
}

// May returns the reason why the caller lacks the role, or "" if the caller has the role
// or there are no tokens. known reports whether the caller is known. A tenant with Admin
// may do what tenantMethods names.
func (s *Server) May(r *http.Request, need Role) (problem string, known bool) {
	if s.tokens == nil {
		return "", true
	}
	_, problem, known = s.tokens.check(r.Header.Get("Authorization"), r.TLS, need)
	return problem, known
}

// Tenant returns the tenant of an HTTP request; see Tokens.Tenant.
func (s *Server) Tenant(r *http.Request) string { return s.tokens.Tenant(r) }

// CallerName returns the name of an HTTP request's caller for logs. The name is the address, after the
// name in the verified certificate or the beginning of the token's SHA-256 if the request has one.
func CallerName(r *http.Request) string {
	if name := caller(r.Header.Get("Authorization"), r.TLS); name != anonymous {
		return name + " at " + r.RemoteAddr
	}
	return r.RemoteAddr
}

// Administrative reports whether a request changes something or has a path below /debug/.
func Administrative(r *http.Request) bool {
	return r.Method != http.MethodGet && r.Method != http.MethodHead && r.Method != http.MethodOptions || strings.HasPrefix(r.URL.Path, "/debug/")
}

func needsHTTP(r *http.Request) Role {
	switch {
	case r.Method == http.MethodPost && r.URL.Path == "/v1/check": // an admission check only reads
		return ReadOnly
	case Administrative(r):
		return Admin
	case r.URL.Path == "/ping", r.URL.Path == "/healthz":
		return Unauthenticated
	}
	return ReadOnly
}
