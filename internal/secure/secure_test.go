package secure

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"flag"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/srtm-io/srtm/api/srtm/envoy"
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// Tokens of each role.
const (
	lookToken  = "look-0123456789abcdef"
	nodeToken  = "node-0123456789abcdef"
	adminToken = "admin-0123456789abcdef"
)

func tokenFile(t *testing.T) string {
	return testkit.File(t, "file", "# who may what\n\nread-only "+lookToken+"\nnode "+nodeToken+"\n  admin\t"+adminToken+"  \n")
}

// serve runs a gRPC server until t ends, and returns its address.
func serve(t *testing.T, cfg ServerConfig) string {
	t.Helper()
	s := testkit.Result(cfg.Load()).Must(t)
	server := grpc.NewServer(s.Options()...)
	healthv1.RegisterHealthServer(server, health.NewServer())
	srtmv1.RegisterAdminServiceServer(server, srtmv1.UnimplementedAdminServiceServer{})
	srtmv1.RegisterPlacementServiceServer(server, srtmv1.UnimplementedPlacementServiceServer{})
	srtmv1.RegisterBrokerServiceServer(server, srtmv1.UnimplementedBrokerServiceServer{})
	srtmv1.RegisterGrantServiceServer(server, srtmv1.UnimplementedGrantServiceServer{})
	srtmv1.RegisterAdmissionAdminServer(server, srtmv1.UnimplementedAdmissionAdminServer{})
	srtmv1.RegisterAdmissionReplicationServer(server, srtmv1.UnimplementedAdmissionReplicationServer{})
	return testkit.Serve(t, server)
}

// dial returns a connection that is closed when t ends.
func dial(t *testing.T, address string, cfg ClientConfig) *grpc.ClientConn {
	t.Helper()
	options := testkit.Result(cfg.Load("")).Must(t)
	conn := testkit.Result(grpc.NewClient(address, options...)).Must(t)
	t.Cleanup(func() { conn.Close() })
	return conn
}

// ask calls a method with an empty request and ignores the response. It returns the error.
func ask(t *testing.T, conn *grpc.ClientConn, method string) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Hang)
	defer cancel()
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
	if err != nil {
		return err
	}
	if err := stream.SendMsg(&srtmv1.ListBrokersRequest{}); err != nil && err != io.EOF {
		return err
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	return stream.RecvMsg(&srtmv1.ListBrokersResponse{})
}

// all returns every method of the API.
func all(t *testing.T) (methods []string) {
	t.Helper()
	for _, desc := range []grpc.ServiceDesc{
		srtmv1.AdminService_ServiceDesc, srtmv1.PlacementService_ServiceDesc, srtmv1.BrokerService_ServiceDesc, srtmv1.GrantService_ServiceDesc, srtmv1.AdmissionAdmin_ServiceDesc, srtmv1.AdmissionReplication_ServiceDesc, srtmv1.AdmissionState_ServiceDesc, envoy.RateLimitService_ServiceDesc,
	} {
		for _, m := range desc.Methods {
			methods = append(methods, "/"+desc.ServiceName+"/"+m.MethodName)
		}
		for _, s := range desc.Streams {
			methods = append(methods, "/"+desc.ServiceName+"/"+s.StreamName)
		}
	}
	return methods
}

// Each token permits exactly the methods of its role: the test calls every method of the API with
// every token.
func TestRolesOfEveryMethod(t *testing.T) {
	address := serve(t, ServerConfig{TokenFile: tokenFile(t)})
	known := map[string]bool{}
	for _, m := range all(t) {
		known[m] = true
	}
	for method := range methods {
		if !known[method] {
			t.Errorf("%s is none of the API", method)
		}
	}
	bearers := map[string]struct {
		token string
		role  Role
	}{"unauthenticated": {"", Unauthenticated}, "read-only": {lookToken, ReadOnly}, "node": {nodeToken, Node}, "admin": {adminToken, Admin}}
	for name, b := range bearers {
		var cfg ClientConfig
		if b.token != "" {
			cfg.TokenFile = testkit.File(t, "file", b.token+"\n")
		}
		conn := dial(t, address, cfg)
		for method := range known {
			want := codes.Unimplemented // the call was permitted
			switch {
			case b.role == Unauthenticated:
				want = codes.Unauthenticated
			case b.role < needs(method):
				want = codes.PermissionDenied
			}
			testkit.Equal(t, status.Code(ask(t, conn, method)), want, "%s: %s", name, method)
		}
		if _, err := healthv1.NewHealthClient(conn).Check(t.Context(), &healthv1.HealthCheckRequest{}); err != nil {
			t.Errorf("%s: health: %v", name, err)
		}
	}
	conn := dial(t, address, ClientConfig{TokenFile: testkit.File(t, "file", strings.Repeat("x", 40))})
	err := ask(t, conn, srtmv1.AdminService_ListTopics_FullMethodName)
	if status.Code(err) != codes.Unauthenticated || !strings.Contains(err.Error(), badToken) {
		t.Errorf("an unknown token: %v", err)
	}
}

// A tenant's admin token permits changes of the tenant's own topics. It permits no cluster methods and
// no methods between daemons. The test calls every method of the API.
func TestWhatATenantsAdminMayCall(t *testing.T) {
	const service = "/srtm.v1.AdminService/"
	own := map[string]bool{}
	for _, name := range []string{
		"CreateTopic", "UpdateTopic", "DeleteTopic", "MovePublishers", "ProfileTopic", "SeekChannel",
		"CreateChannel", "PauseChannel", "UnpauseChannel", "DeleteChannel", "EmptyChannel",
	} {
		own[service+name] = true
	}
	conn := dial(t, serve(t, ServerConfig{TokenFile: testkit.File(t, "file", "admin "+adminToken+" acme\n")}), ClientConfig{TokenFile: testkit.File(t, "file", adminToken)})
	for _, method := range all(t) {
		want := codes.PermissionDenied
		if own[method] || needs(method) == ReadOnly {
			want = codes.Unimplemented // the call was permitted
		}
		err := ask(t, conn, method)
		testkit.Equal(t, status.Code(err), want, "%s: %v", method, err)
		if want == codes.PermissionDenied && !strings.Contains(err.Error(), "tenant acme") {
			t.Errorf("%s: %v does not name the tenant", method, err)
		}
	}
	s := testkit.Result(ServerConfig{TokenFile: testkit.File(t, "file", "admin "+adminToken+" acme\nadmin "+nodeToken+"\n")}.Load()).Must(t)
	handler := s.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	for _, c := range []struct {
		method, path, token string
		code                int
	}{
		{"POST", "/topic/delete?topic=t", adminToken, http.StatusForbidden},
		{"GET", "/debug/pprof/heap", adminToken, http.StatusForbidden},
		{"GET", "/lookup?topic=t", adminToken, http.StatusOK},
		{"POST", "/topic/delete?topic=t", nodeToken, http.StatusOK},
	} {
		r, w := httptest.NewRequest(c.method, c.path, nil), httptest.NewRecorder()
		r.Header.Set("Authorization", "Bearer "+c.token)
		handler.ServeHTTP(w, r)
		testkit.Equal(t, w.Code, c.code, "%s %s: %s", c.method, c.path, w.Body)
		if problem, _ := s.Tokens().Check(r, needsHTTP(r)); (problem == "") != (c.code == http.StatusOK) {
			t.Errorf("%s %s at nsqd: %q", c.method, c.path, problem)
		}
	}
}

// raw is a codec that sends bytes unchanged.
type raw struct{}

func (raw) Marshal(v any) ([]byte, error) { return v.([]byte), nil }
func (raw) Unmarshal([]byte, any) error   { return nil }
func (raw) Name() string                  { return "raw" }

// A request that its caller may not make is neither read nor decoded.
func TestNothingIsDecodedForStrangers(t *testing.T) {
	conn := dial(t, serve(t, ServerConfig{TokenFile: tokenFile(t)}), ClientConfig{})
	for name, body := range map[string][]byte{"no message": {0xff, 0xff}, "5 MiB": make([]byte, 5<<20)} {
		ctx, cancel := context.WithTimeout(t.Context(), testkit.Hang)
		err := conn.Invoke(ctx, srtmv1.AdminService_DeleteTopic_FullMethodName, body, nil, grpc.ForceCodec(raw{}))
		cancel()
		if status.Code(err) != codes.Unauthenticated || len(status.Convert(err).Details()) != 1 {
			t.Errorf("%s: %v, want that a token is needed", name, err)
		}
	}
}

// brokers takes the first message of a session and ends the session.
type brokers struct {
	srtmv1.UnimplementedBrokerServiceServer
}

func (brokers) Session(stream srtmv1.BrokerService_SessionServer) error {
	_, err := stream.Recv()
	return err
}

type grants struct {
	srtmv1.UnimplementedGrantServiceServer
}

func (grants) Session(stream srtmv1.GrantService_SessionServer) error {
	_, err := stream.Recv()
	return err
}

// A client certificate has the role that the file gives to its name. A node's token or certificate may
// be bound to one broker.
func TestCertificatesAndBrokers(t *testing.T) {
	a := testkit.NewAuthority(t)
	server := a.Certificate("server")
	file := testkit.File(t, "file", "admin cert:ops\nread-only cert:dash\nnode cert:b1 b1\nnode "+nodeToken+" b2\nnode any-0123456789abcdef\n")
	s, err := ServerConfig{CertFile: server.CertFile, KeyFile: server.KeyFile, ClientCAFile: a.File, TokenFile: file, HTTPTLS: true}.Load()
	testkit.Must(t, err)
	rpc := grpc.NewServer(s.Options()...)
	srtmv1.RegisterAdminServiceServer(rpc, srtmv1.UnimplementedAdminServiceServer{})
	srtmv1.RegisterBrokerServiceServer(rpc, brokers{})
	srtmv1.RegisterGrantServiceServer(rpc, grants{})
	address := testkit.Serve(t, rpc)
	web := httptest.NewUnstartedServer(s.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})))
	web.Listener = s.Listener(web.Listener)
	web.Start()
	defer web.Close()

	for name, c := range map[string]struct {
		cert, token  string
		create, list codes.Code // expected results; Unimplemented: allowed
		b1, b2       codes.Code // expected for a session as this broker; OK: allowed
		post, get    int
		problem      string // text of the first refusal
	}{
		"an operator":            {"ops", "", codes.Unimplemented, codes.Unimplemented, codes.OK, codes.OK, 200, 200, ""},
		"a dashboard":            {"dash", "", codes.PermissionDenied, codes.Unimplemented, codes.PermissionDenied, codes.PermissionDenied, 403, 200, "the certificate's role is read-only, and this takes admin"},
		"a broker's certificate": {"b1", "", codes.PermissionDenied, codes.Unimplemented, codes.OK, codes.PermissionDenied, 403, 200, "the certificate's role is node, and this takes admin"},
		"a broker's token":       {"other", nodeToken, codes.PermissionDenied, codes.Unimplemented, codes.PermissionDenied, codes.OK, 403, 200, "the token's role is node, and this takes admin"},
		"any broker's token":     {"other", "any-0123456789abcdef", codes.PermissionDenied, codes.Unimplemented, codes.OK, codes.OK, 403, 200, "the token's role is node, and this takes admin"},
		"neither":                {"other", "", codes.Unauthenticated, codes.Unauthenticated, codes.Unauthenticated, codes.Unauthenticated, 401, 401, noToken},
		"a token counts first":   {"ops", nodeToken, codes.PermissionDenied, codes.Unimplemented, codes.PermissionDenied, codes.OK, 403, 200, "the token's role is node, and this takes admin"},
		"an unknown token":       {"ops", strings.Repeat("x", 40), codes.Unauthenticated, codes.Unauthenticated, codes.Unauthenticated, codes.Unauthenticated, 401, 401, badToken},
		"a name as a token":      {"other", "cert:ops", codes.Unauthenticated, codes.Unauthenticated, codes.Unauthenticated, codes.Unauthenticated, 401, 401, badToken},
	} {
		cert := a.Certificate(c.cert)
		cfg := ClientConfig{CAFile: a.File, CertFile: cert.CertFile, KeyFile: cert.KeyFile}
		options := testkit.Result(cfg.Load("")).Must(t)
		if c.token != "" { // as an unauthenticated client, which reads none of our files
			options = append(options, grpc.WithPerRPCCredentials(Bearer(func() string { return c.token })))
		}
		conn, err := grpc.NewClient(address, options...)
		testkit.Must(t, err)
		defer conn.Close()
		err = ask(t, conn, srtmv1.AdminService_CreateTopic_FullMethodName)
		if status.Code(err) != c.create || !strings.Contains(err.Error(), c.problem) {
			t.Errorf("%s: create: %v, want %v, %q", name, err, c.create, c.problem)
		}
		if err := ask(t, conn, srtmv1.AdminService_ListTopics_FullMethodName); status.Code(err) != c.list {
			t.Errorf("%s: list: %v, want %v", name, err, c.list)
		}
		for id, want := range map[string]codes.Code{"b1": c.b1, "b2": c.b2} {
			if err := joins(t, conn, id); status.Code(err) != want {
				t.Errorf("%s: as %s: %v, want %v", name, id, err, want)
			}
		}
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: a.Pool, Certificates: []tls.Certificate{cert.TLS}}}}
		for method, want := range map[string]int{http.MethodPost: c.post, http.MethodGet: c.get} {
			req, err := http.NewRequestWithContext(t.Context(), method, "https://"+web.Listener.Addr().String()+"/topics", nil)
			testkit.Must(t, err)
			if c.token != "" {
				req.Header.Set("Authorization", "Bearer "+c.token)
			}
			res := testkit.Result(client.Do(req)).Must(t)
			res.Body.Close()
			testkit.Equal(t, res.StatusCode, want, "%s: %s", name, method)
		}
	}
}

// joins sends a hello as a broker to both services, and returns the one error with which both sessions
// end. It returns nil if both services accepted the hello.
func joins(t *testing.T, conn *grpc.ClientConn, id string) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Hang)
	defer cancel()
	var errs [2]error
	for i, method := range []string{srtmv1.BrokerService_Session_FullMethodName, srtmv1.GrantService_Session_FullMethodName} {
		stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
		testkit.Must(t, err)
		var hello any = &srtmv1.BrokerMessage{Message: &srtmv1.BrokerMessage_Hello{Hello: &srtmv1.BrokerHello{BrokerId: id}}}
		if i == 1 {
			hello = &srtmv1.NodeMessage{Message: &srtmv1.NodeMessage_Hello{Hello: &srtmv1.NodeHello{BrokerId: id}}}
		}
		if err := stream.SendMsg(hello); err != nil && err != io.EOF {
			t.Fatal(err)
		}
		if errs[i] = stream.RecvMsg(&srtmv1.ListBrokersResponse{}); errs[i] == io.EOF {
			errs[i] = nil
		}
	}
	testkit.Equal(t, status.Code(errs[0]), status.Code(errs[1]), "as %s: %v, but %v", id, errs[0], errs[1])
	return errs[0]
}

// Every method that changes something requires Admin, including methods that are added later.
func TestWhoMayChange(t *testing.T) {
	for method, want := range map[string]Role{
		srtmv1.AdminService_CreateTopic_FullMethodName:    Admin,
		srtmv1.AdminService_DeleteTopic_FullMethodName:    Admin,
		srtmv1.GrantService_SetContract_FullMethodName:    Admin,
		srtmv1.GrantService_RemoveContract_FullMethodName: Admin,
		srtmv1.BrokerService_Session_FullMethodName:       Node,
		srtmv1.GrantService_Session_FullMethodName:        Node,
		srtmv1.PlacementService_Watch_FullMethodName:      ReadOnly,
		"/srtm.v1.AdminService/NotWrittenYet":             Admin,
		"/grpc.health.v1.Health/Check":                    Unauthenticated,
		"/grpc.reflection.v1.ServerReflection/Info":       ReadOnly,
	} {
		testkit.Equal(t, needs(method), want, "%s takes", method)
	}
}

func TestTLS(t *testing.T) {
	ours, others := testkit.NewAuthority(t), testkit.NewAuthority(t)
	server, client := ours.Certificate("server"), ours.Certificate("client")
	tlsOnly := serve(t, ServerConfig{CertFile: server.CertFile, KeyFile: server.KeyFile})
	mutual := serve(t, ServerConfig{CertFile: server.CertFile, KeyFile: server.KeyFile, ClientCAFile: ours.File})
	old := ours.Expired("old")
	expired := serve(t, ServerConfig{CertFile: old.CertFile, KeyFile: old.KeyFile})
	elsewhere := ours.Elsewhere("away")
	wrongHost := serve(t, ServerConfig{CertFile: elsewhere.CertFile, KeyFile: elsewhere.KeyFile})
	clear := serve(t, ServerConfig{})
	foreign, late := others.Certificate("client"), ours.Expired("late")

	for name, c := range map[string]struct {
		address string
		cfg     ClientConfig
		fault   string // in the error; "": it works
	}{
		"TLS":                               {tlsOnly, ClientConfig{CAFile: ours.File}, ""},
		"in clear to a server with TLS":     {tlsOnly, ClientConfig{}, "spoken to in clear, the server ended the connection: it may take TLS"},
		"TLS to a server without":           {clear, ClientConfig{CAFile: ours.File}, "first record does not look like a TLS handshake"},
		"an authority of others":            {tlsOnly, ClientConfig{CAFile: others.File}, "certificate signed by unknown authority"},
		"the system's authorities":          {tlsOnly, ClientConfig{CAFile: SystemCA}, "certificate signed by unknown authority"},
		"a server with an old certificate":  {expired, ClientConfig{CAFile: ours.File}, "expired"},
		"a server with another's":           {wrongHost, ClientConfig{CAFile: ours.File}, "certificate is valid for 192.0.2.1, not 127.0.0.1"},
		"mutual":                            {mutual, ClientConfig{CAFile: ours.File, CertFile: client.CertFile, KeyFile: client.KeyFile}, ""},
		"mutual, without our certificate":   {mutual, ClientConfig{CAFile: ours.File}, "certificate required"},
		"mutual, with that of others":       {mutual, ClientConfig{CAFile: ours.File, CertFile: foreign.CertFile, KeyFile: foreign.KeyFile}, "certificate"},
		"mutual, with an old certificate":   {mutual, ClientConfig{CAFile: ours.File, CertFile: late.CertFile, KeyFile: late.KeyFile}, "certificate"},
		"mutual, in clear":                  {mutual, ClientConfig{}, "error reading server preface"},
		"in clear, where nothing is needed": {clear, ClientConfig{}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			err := ask(t, dial(t, c.address, c.cfg), srtmv1.AdminService_CreateTopic_FullMethodName)
			if c.fault == "" {
				if status.Code(err) != codes.Unimplemented {
					t.Errorf("got %v", err)
				}
				return
			}
			if status.Code(err) != codes.Unavailable && status.Code(err) != codes.DeadlineExceeded {
				t.Errorf("got %v, want no connection", err)
			}
			// The server's reply about a client's certificate may be lost with the connection.
			if strings.HasPrefix(name, "mutual") {
				return
			}
			if !strings.Contains(err.Error(), c.fault) {
				t.Errorf("got %v, want %q", err, c.fault)
			}
		})
	}
}

// A server logs the peer and the cause of a failed handshake, at most once a second.
func TestFailedHandshakesAreLogged(t *testing.T) {
	cert := testkit.NewAuthority(t).Certificate("server")
	s, err := ServerConfig{CertFile: cert.CertFile, KeyFile: cert.KeyFile}.Load()
	testkit.Must(t, err)
	lines := make(chan string, 100)
	s.Log(slog.New(slog.NewTextHandler(each(lines), nil)))
	server := grpc.NewServer(s.Options()...)
	ln := testkit.Listen(t)
	done := make(chan error, 1)
	go func() { done <- server.Serve(ln) }()
	begun := time.Now()
	err = ask(t, dial(t, ln.Addr().String(), ClientConfig{}), srtmv1.AdminService_ListTopics_FullMethodName)
	testkit.Equal(t, status.Code(err), codes.Unavailable, "in clear: %v", err)
	for range 20 {
		c := testkit.Result(net.Dial("tcp", ln.Addr().String())).Must(t)
		testkit.Result(c.Write([]byte("GET / HTTP/1.1\r\n\r\n"))).Must(t)
		_, _ = io.Copy(io.Discard, c) // until the server refuses the connection
		c.Close()
	}
	server.Stop()
	testkit.NoError(t, <-done)
	most := int(time.Since(begun)/time.Second) + 2
	if line := <-lines; !strings.Contains(line, "the client speaks in clear, and this port takes TLS") || !strings.Contains(line, "remote=127.0.0.1:") {
		t.Errorf("logged %q", line)
	}
	if len(lines) >= most {
		t.Errorf("and %d lines more", len(lines))
	}
}

// each is a writer that sends each written line to the channel.
type each chan<- string

func (e each) Write(b []byte) (int, error) {
	e <- string(b)
	return len(b), nil
}

func TestTLSAndTokens(t *testing.T) {
	a := testkit.NewAuthority(t)
	server := a.Certificate("server")
	address := serve(t, ServerConfig{CertFile: server.CertFile, KeyFile: server.KeyFile, TokenFile: tokenFile(t)})
	for token, want := range map[string]codes.Code{adminToken: codes.Unimplemented, nodeToken: codes.PermissionDenied} {
		conn := dial(t, address, ClientConfig{CAFile: a.File, TokenFile: testkit.File(t, "file", token)})
		testkit.Equal(t, status.Code(ask(t, conn, srtmv1.AdminService_CreateTopic_FullMethodName)), want, "%s", token)
	}
}

func TestHTTP(t *testing.T) {
	a := testkit.NewAuthority(t)
	cert := a.Certificate("server")
	s, err := ServerConfig{CertFile: cert.CertFile, KeyFile: cert.KeyFile, TokenFile: tokenFile(t), HTTPTLS: true}.Load()
	testkit.Must(t, err)
	web := httptest.NewUnstartedServer(s.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), "/open", "/debug/open"))
	web.Listener = s.Listener(web.Listener)
	web.Start()
	defer web.Close()
	client := web.Client()
	client.Transport.(*http.Transport).TLSClientConfig = &tls.Config{RootCAs: a.Pool}
	url := "https://" + web.Listener.Addr().String()
	for _, c := range []struct {
		method, path, token string
		want                int
	}{
		{"GET", "/ping", "", 200},
		{"GET", "/healthz", "", 200},
		{"GET", "/lookup?topic=t", "", 401},
		{"GET", "/open?topic=t", "", 200},
		{"GET", "/open?topic=t", strings.Repeat("x", 40), 200},
		{"POST", "/open?topic=t", "", 401},
		{"GET", "/debug/open", "", 401},
		{"GET", "/lookup?topic=t", strings.Repeat("x", 40), 401},
		{"GET", "/lookup?topic=t", lookToken, 200},
		{"GET", "/metrics", lookToken, 200},
		{"GET", "/debug/state", lookToken, 403},
		{"GET", "/debug/pprof/", nodeToken, 403},
		{"GET", "/debug/state", adminToken, 200},
		{"POST", "/topic/delete?topic=t", lookToken, 403},
		{"POST", "/ping", lookToken, 403},
		{"PUT", "/config/x", nodeToken, 403},
		{"POST", "/topic/delete?topic=t", adminToken, 200},
	} {
		req := testkit.Result(http.NewRequestWithContext(t.Context(), c.method, url+c.path, nil)).Must(t)
		if c.token != "" {
			req.Header.Set("Authorization", "Bearer "+c.token)
		}
		res := testkit.Result(client.Do(req)).Must(t)
		res.Body.Close()
		if res.StatusCode != c.want || (c.want == 401) != (res.Header.Get("WWW-Authenticate") == "Bearer") {
			t.Errorf("%s %s with %q: %d, want %d", c.method, c.path, c.token, res.StatusCode, c.want)
		}
	}
	if res, err := http.NewRequest("GET", "http://"+web.Listener.Addr().String()+"/ping", nil); err != nil {
		t.Fatal(err)
	} else if answer, err := client.Do(res); err == nil {
		body, err := io.ReadAll(answer.Body)
		answer.Body.Close()
		testkit.Must(t, err)
		if answer.StatusCode == http.StatusOK {
			t.Error("it answers in clear, too")
		}
		if text := string(body); !strings.Contains(text, "HTTP request to an HTTPS server") {
			t.Errorf("a client in clear gets %q", text)
		}
	}

	open := testkit.Result(ServerConfig{}.Load()).Must(t)
	w := httptest.NewRecorder()
	open.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) })).
		ServeHTTP(w, httptest.NewRequest("POST", "/debug/x", nil))
	if ln := testkit.Listen(t); w.Code != http.StatusTeapot || open.Listener(ln) != ln {
		t.Errorf("without configuration: %d, or another listener", w.Code)
	}
}

func TestWhereToListen(t *testing.T) {
	a := testkit.NewAuthority(t)
	cert, file := a.Certificate("server"), tokenFile(t)
	onlyTLS := ServerConfig{CertFile: cert.CertFile, KeyFile: cert.KeyFile}
	with := func(change func(*ServerConfig)) ServerConfig {
		c := onlyTLS
		change(&c)
		return c
	}
	const everywhere = "0.0.0.0:4170"
	for name, c := range map[string]struct {
		cfg               ServerConfig
		address           string
		rpc, http, others bool // allowed
	}{
		"loopback":           {ServerConfig{}, "127.0.0.1:1", true, true, true},
		"loopback, IPv6":     {ServerConfig{}, "[::1]:1", true, true, true},
		"loopback, by name":  {ServerConfig{}, "localhost:1", true, true, true},
		"none":               {ServerConfig{}, "", true, true, true},
		"everywhere":         {ServerConfig{}, everywhere, false, false, false},
		"every interface":    {ServerConfig{}, ":4170", false, false, false},
		"one beyond":         {ServerConfig{}, "192.0.2.1:4170", false, false, false},
		"TLS alone":          {onlyTLS, everywhere, false, false, false},
		"tokens in clear":    {ServerConfig{TokenFile: file}, everywhere, false, false, false},
		"mutual":             {with(func(c *ServerConfig) { c.ClientCAFile = a.File }), everywhere, true, false, false},
		"mutual, HTTP too":   {with(func(c *ServerConfig) { c.ClientCAFile, c.HTTPTLS = a.File, true }), everywhere, true, true, false},
		"TLS and tokens":     {with(func(c *ServerConfig) { c.TokenFile = file }), everywhere, true, false, false},
		"both, and for HTTP": {with(func(c *ServerConfig) { c.TokenFile, c.HTTPTLS = file, true }), everywhere, true, true, false},
		"HTTP alone":         {with(func(c *ServerConfig) { c.TokenFile, c.HTTPOnly = file, true }), everywhere, true, true, false},
		"HTTP alone, clear":  {ServerConfig{HTTPOnly: true}, everywhere, false, false, false},
		"forced":             {ServerConfig{Force: "true"}, everywhere, true, true, true},
		"some are forced":    {ServerConfig{Force: ",tcp-address,grpc-address"}, everywhere, true, false, true},
	} {
		s := c.cfg
		for _, check := range []struct {
			what string
			err  error
			want bool
		}{
			{"gRPC", s.CheckGRPC("--grpc-address", c.address), c.rpc},
			{"HTTP", s.CheckHTTP("--http-address", c.address), c.http},
			{"else", s.CheckPlain("--tcp-address", c.address), c.others},
		} {
			if (check.err == nil) != check.want {
				t.Errorf("%s: %s: %v, want allowed: %v", name, check.what, check.err, check.want)
			}
			if check.err != nil && !strings.Contains(check.err.Error(), "--allow-insecure-listen=") {
				t.Errorf("%s: %v does not say how", name, check.err)
			}
		}
	}
}

func TestFaultsAreNamedTogether(t *testing.T) {
	a := testkit.NewAuthority(t)
	cert := a.Certificate("server")
	empty := testkit.File(t, "file", "")
	for name, c := range map[string]struct {
		cfg  ServerConfig
		want []string
	}{
		"half a pair": {ServerConfig{CertFile: "x", ClientCAFile: empty, TokenFile: empty}, []string{"--tls-cert and --tls-key", "--tls-client-ca", "no certificate", "--token-file", "no token"}},
		"no pair":     {ServerConfig{CertFile: "/nothing", KeyFile: "/nothing"}, []string{"--tls-cert, --tls-key", "/nothing"}},
		"no pair, no lists": {
			ServerConfig{CertFile: "/nothing", KeyFile: "/nothing", ClientCAFile: a.File, CRLFile: "/none", TokenFile: empty},
			[]string{"--tls-cert, --tls-key", "--tls-crl: open /none", "--token-file"},
		},
		"neither pair": {ServerConfig{ClientCAFile: empty, HTTPTLS: true}, []string{"--tls-client-ca needs --tls-cert", "--http-tls needs --tls-cert", "no certificate"}},
		"CA alone":     {ServerConfig{ClientCAFile: a.File}, []string{"--tls-client-ca needs --tls-cert"}},
		"HTTP alone":   {ServerConfig{HTTPTLS: true}, []string{"--http-tls needs --tls-cert"}},
		"tokens": {ServerConfig{TokenFile: testkit.File(t, "file", "root "+adminToken+"\nadmin\nadmin short\nnode "+adminToken+" x y\nadmin "+adminToken+"\nnode "+adminToken+"\nadmin "+adminToken+" b1\nnode cert:b1\nadmin cert:b1\nnode cert:\n")},
			[]string{":1: want a role", ":2: 1 words", ":3: the token has 5 bytes", ":4: 4 words", ":6: the token is there already",
				":7: the token is there already", ":9: cert:b1 is there already", ":10: want the name of a certificate"}},
		"no file": {ServerConfig{TokenFile: "/nothing"}, []string{"--token-file", "/nothing"}},
	} {
		_, err := c.cfg.Load()
		for _, part := range c.want {
			if err == nil || !strings.Contains(err.Error(), part) {
				t.Errorf("%s: %v\ndoes not say %q", name, err, part)
			}
		}
		if err != nil && strings.Contains(err.Error(), adminToken) {
			t.Errorf("%s: %v contains the token", name, err)
		}
	}
	for name, c := range map[string]struct {
		cfg  ClientConfig
		want []string
	}{
		"half a pair": {ClientConfig{CAFile: empty, CertFile: "x", TokenFile: empty}, []string{"--p-tls-ca", "--p-tls-cert and --p-tls-key", "--p-token-file", "want one token"}},
		"no CA":       {ClientConfig{CertFile: cert.CertFile, KeyFile: cert.KeyFile}, []string{"--p-tls-cert needs --p-tls-ca"}},
		"no pair":     {ClientConfig{CAFile: a.File, CertFile: "/nothing", KeyFile: "/nothing"}, []string{"--p-tls-cert, --p-tls-key"}},
		"short":       {ClientConfig{TokenFile: testkit.File(t, "file", "short")}, []string{"5 bytes"}},
	} {
		_, err := c.cfg.Load("p-")
		for _, part := range c.want {
			if err == nil || !strings.Contains(err.Error(), part) {
				t.Errorf("%s: %v\ndoes not say %q", name, err, part)
			}
		}
	}
	testkit.Result(readToken(testkit.File(t, "file", "admin "+adminToken+"\n"))).Equal(t, adminToken, "a line of a server's file")
}

func TestFlags(t *testing.T) {
	fs := flag.NewFlagSet("x", flag.ContinueOnError)
	var s ServerConfig
	var c ClientConfig
	s.Flags(fs, "grpc-address", "http-address")
	c.Flags(fs, "control-", "the loaddistributor")
	err := fs.Parse([]string{"--tls-cert=a", "--tls-key=b", "--tls-client-ca=c", "--token-file=d", "--http-tls", "--allow-insecure-listen",
		"--control-tls-ca=e", "--control-tls-cert=f", "--control-tls-key=g", "--control-token-file=h"})
	if err != nil || s != (ServerConfig{CertFile: "a", KeyFile: "b", ClientCAFile: "c", TokenFile: "d", HTTPTLS: true, Force: "true"}) || c != (ClientConfig{"e", "f", "g", "h", c.log}) {
		t.Errorf("%+v, %+v, %v", s, c, err)
	}
}

// A server with only HTTP has no flag --http-tls, and its errors name no such flag.
func TestFlagsOfHTTPAlone(t *testing.T) {
	fs := flag.NewFlagSet("x", flag.ContinueOnError)
	var c ServerConfig
	c.HTTPFlags(fs, "http-address")
	if err := fs.Parse(nil); err != nil || fs.Lookup("http-tls") != nil || fs.Lookup("token-file") == nil {
		t.Errorf("flags of HTTP alone, %v", err)
	}
	want := "--http-address :80 is beyond loopback, which takes --tls-cert and --tls-key, and --tls-client-ca or --token-file; --allow-insecure-listen=http-address listens all the same"
	if err := c.CheckHTTP("--http-address", ":80"); err == nil || err.Error() != want {
		t.Errorf("%v\nwant %s", err, want)
	}
}

func TestWhichListenersAreForced(t *testing.T) {
	for args, want := range map[string]string{
		"":                                    "",
		"--allow-insecure-listen":             "true",
		"--allow-insecure-listen=tcp-address": ",tcp-address",
		"--allow-insecure-listen=tcp-address --allow-insecure-listen=http-address":       ",tcp-address,http-address",
		"--allow-insecure-listen=tcp-address,http-address --allow-insecure-listen=false": "",
		"--allow-insecure-listen=tcp-address,grpc-address":                               `"grpc-address" is none of tcp-address, http-address`,
		"--allow-insecure-listen=": `"" is none of`,
	} {
		fs := flag.NewFlagSet("x", flag.ContinueOnError)
		fs.SetOutput(io.Discard)
		var c ServerConfig
		c.Flags(fs, "tcp-address", "http-address")
		err := fs.Parse(strings.Fields(args))
		if err == nil && c.Force != want || err != nil && (want == "" || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %q, %v; want %q", args, c.Force, err, want)
		}
	}
}

// tenants answers with the tenant of the caller.
type tenants struct {
	srtmv1.UnimplementedAdminServiceServer
}

func (tenants) GetTopic(ctx context.Context, _ *srtmv1.GetTopicRequest) (*srtmv1.GetTopicResponse, error) {
	return &srtmv1.GetTopicResponse{Topic: &srtmv1.Topic{Reason: Tenant(ctx)}}, nil
}

// A caller's tenant comes from the caller's token, or else from the organisation in the caller's
// certificate.
func TestTenants(t *testing.T) {
	cfg := ServerConfig{TokenFile: testkit.File(t, "file", "admin "+adminToken+" acme\nread-only "+lookToken+"\nread-only cert:dash initech\n")}
	s, err := cfg.Load()
	testkit.Must(t, err)
	rpc := grpc.NewServer(s.Options()...)
	srtmv1.RegisterAdminServiceServer(rpc, tenants{})
	address := testkit.Serve(t, rpc)
	named := func(name, organisation string) *tls.ConnectionState {
		return &tls.ConnectionState{VerifiedChains: [][]*x509.Certificate{{{Subject: pkix.Name{CommonName: name, Organization: []string{organisation}}}}}}
	}
	for _, c := range []struct {
		token  string
		state  *tls.ConnectionState
		tenant string
	}{
		{adminToken, nil, "acme"}, {lookToken, nil, ""}, {"", nil, ""},
		{adminToken, named("x", "Umbrella"), "acme"}, {lookToken, named("x", "Umbrella Co/1"), "Umbrella%20Co%2F1"},
		{"", named("dash", "Umbrella"), "initech"}, {"", named("other", "Umbrella"), "Umbrella"},
		{"", &tls.ConnectionState{PeerCertificates: []*x509.Certificate{{Subject: pkix.Name{Organization: []string{"unverified"}}}}}, ""},
	} {
		r := httptest.NewRequest("GET", "/", nil)
		r.TLS = c.state
		if c.token != "" {
			r.Header.Set("Authorization", "Bearer "+c.token)
		}
		testkit.Equal(t, s.tokens.Tenant(r), c.tenant, "%+v", c)
		if c.state != nil || c.token == "" {
			continue
		}
		conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithPerRPCCredentials(Bearer(func() string { return c.token })))
		testkit.Must(t, err)
		reply, err := srtmv1.NewAdminServiceClient(conn).GetTopic(t.Context(), &srtmv1.GetTopicRequest{})
		if err != nil || reply.GetTopic().GetReason() != c.tenant {
			t.Errorf("%+v: by gRPC %v, %v", c, reply, err)
		}
		conn.Close()
	}
	for _, line := range []string{"admin " + adminToken + " a/b", "admin " + adminToken + " " + strings.Repeat("a", 65)} {
		_, err := LoadTokens("--token-file", testkit.File(t, "file", line))
		testkit.ErrorHas(t, err, "tenant", "%s", line)
	}
}

func FuzzTokenFile(f *testing.F) {
	f.Add("admin " + adminToken + "\n# x\nread-only " + lookToken)
	f.Add("admin\n")
	f.Add("node " + nodeToken + " b1\nnode cert:b2 b2\nadmin cert:ops")
	path := filepath.Join(f.TempDir(), "tokens")
	f.Fuzz(func(t *testing.T, text string) {
		testkit.Must(t, os.WriteFile(path, []byte(text), 0o600))
		all, err := readTokens(path)
		if err != nil {
			return
		}
		grants := append(slices.Collect(maps.Values(all.byDigest)), slices.Collect(maps.Values(all.byName))...)
		for _, may := range grants {
			if may.role < ReadOnly || may.role > Admin || may.broker != "" && may.role != Node {
				t.Fatalf("%+v", may)
			}
		}
		_, known := all.token("")
		_, named := all.certificate(&x509.Certificate{})
		if known || named || len(grants) == 0 {
			t.Fatalf("%d lines, the empty token is known: %v, the empty name: %v", len(grants), known, named)
		}
	})
}
