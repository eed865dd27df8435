package secure

import (
	"bytes"
	"crypto/tls"
	"errors"
	"flag"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
)

// replace replaces a file by a new file with the text of another file.
func replace(t *testing.T, path, source string) {
	t.Helper()
	text, err := os.ReadFile(source)
	if err == nil {
		err = os.WriteFile(path+".new", text, 0o600)
	}
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	testkit.Must(t, err)
}

func TestChangedFilesAreReloaded(t *testing.T) {
	var lines bytes.Buffer
	log := &atomic.Pointer[slog.Logger]{}
	log.Store(slog.New(slog.NewTextHandler(&lines, nil)))
	path := testkit.File(t, "file", "one")
	reads := 0
	f, err := newFresh(log, func() (string, error) {
		reads++
		text, err := os.ReadFile(path)
		if string(text) == "bad" {
			err = errors.New("it is bad")
		}
		return string(text), err
	}, path, "")
	testkit.Must(t, err)
	at := time.Unix(0, f.due.Load())
	f.now = func() time.Time { return at }
	step := func(why, want string, wantReads int) {
		t.Helper()
		if got := f.get(); got != want || reads != wantReads {
			t.Errorf("%s: %q after %d reads, want %q after %d", why, got, reads, want, wantReads)
		}
		at = at.Add(checkEvery)
	}
	step("nothing has changed", "one", 1)
	replace(t, path, testkit.File(t, "file", "two"))
	step("it has", "two", 2)
	step("nothing has changed since", "two", 2)
	replace(t, path, testkit.File(t, "file", "bad"))
	step("it cannot be read", "two", 3)
	step("and is not tried again as it is", "two", 3)
	testkit.Must(t, os.Remove(path))
	step("it is gone", "two", 4)
	replace(t, path, testkit.File(t, "file", "two"))
	step("it is back", "two", 5)
	replace(t, path, testkit.File(t, "file", "three"))
	at = at.Add(-time.Nanosecond)
	testkit.Equal(t, f.get(), "two", "it is looked at too soon")
	at = at.Add(time.Nanosecond)
	step("but then", "three", 6)
	ReadAgain()
	at = at.Add(-2 * checkEvery)
	step("an operator demands it, though it looks unchanged and was looked at just then", "three", 7)
	step("once", "three", 7)
	if all := lines.String(); strings.Count(all, "read again") != 4 || strings.Count(all, "stay in force") != 2 || !strings.Contains(all, "it is bad") {
		t.Errorf("logged\n%s", all)
	}
	_, err = newFresh(log, func() (int, error) { return 0, io.EOF })
	testkit.ErrorIs(t, err, io.EOF, "a first read that fails")
}

// Certificates of another authority, and other tokens, replace the current ones for new connections.
// Existing connections stay.
func TestCredentialsAreReplacedWhileTheyAreUsed(t *testing.T) {
	ours, others := testkit.NewAuthority(t), testkit.NewAuthority(t)
	server, client := ours.Certificate("server"), ours.Certificate("client")
	cfg := ServerConfig{CertFile: server.CertFile, KeyFile: server.KeyFile, ClientCAFile: testkit.File(t, "file", ""), TokenFile: tokenFile(t), HTTPTLS: true}
	replace(t, cfg.ClientCAFile, ours.File)
	s, err := cfg.Load()
	testkit.Must(t, err)
	s.Log(slog.New(slog.DiscardHandler))
	var late atomic.Int64 // how far the server's clock is ahead
	now := func() time.Time { return time.Now().Add(time.Duration(late.Load())) }
	s.tls.config.now, s.tokens.tokens.now = now, now
	later := func() { late.Add(int64(2 * checkEvery)) }

	rpc := grpc.NewServer(s.Options()...)
	healthy := health.NewServer()
	healthv1.RegisterHealthServer(rpc, healthy)
	srtmv1.RegisterAdminServiceServer(rpc, srtmv1.UnimplementedAdminServiceServer{})
	at, web := testkit.Serve(t, rpc), testkit.Listen(t)
	done := make(chan error, 1)
	pages := &http.Server{Handler: s.Handler(http.NotFoundHandler()), ReadHeaderTimeout: testkit.Hang, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0)}
	go func() { done <- pages.Serve(s.Listener(web)) }()
	t.Cleanup(func() {
		pages.Close()
		testkit.ErrorIs(t, <-done, http.ErrServerClosed)
	})

	ca, token := testkit.File(t, "file", ""), testkit.File(t, "file", adminToken)
	replace(t, ca, ours.File)
	trust := ClientConfig{CAFile: ca, CertFile: client.CertFile, KeyFile: client.KeyFile, TokenFile: token}
	const method = srtmv1.AdminService_CreateTopic_FullMethodName
	reaches := func(conn *grpc.ClientConn, want codes.Code, who string) {
		t.Helper()
		if err := ask(t, conn, method); status.Code(err) != want {
			t.Errorf("%s: %v, want %v", who, err, want)
		}
	}
	first := dial(t, at, trust)
	reaches(first, codes.Unimplemented, "at first")
	watch, err := healthv1.NewHealthClient(first).Watch(t.Context(), &healthv1.HealthCheckRequest{})
	testkit.Must(t, err)
	state := func(want healthv1.HealthCheckResponse_ServingStatus) {
		t.Helper()
		if r, err := watch.Recv(); err != nil || r.Status != want {
			t.Errorf("the stream of before says %v, %v, want %v", r, err, want)
		}
	}
	state(healthv1.HealthCheckResponse_SERVING)
	answers := func(a *testkit.Authority, pair testkit.Certificate) error {
		t.Helper()
		c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: a.Pool, Certificates: []tls.Certificate{pair.TLS}}}}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+web.Addr().String()+"/ping", nil)
		testkit.Must(t, err)
		res, err := c.Do(req)
		if err == nil {
			err = res.Body.Close()
		}
		return err
	}
	if err := answers(ours, client); err != nil {
		t.Errorf("HTTP at first: %v", err)
	}

	// A new certificate without its key changes nothing.
	newServer, newClient := others.Certificate("server"), others.Certificate("client")
	replace(t, cfg.CertFile, newServer.CertFile)
	later()
	reaches(dial(t, at, trust), codes.Unimplemented, "with half of the new pair")
	replace(t, cfg.KeyFile, newServer.KeyFile)
	replace(t, cfg.ClientCAFile, others.File)
	later()
	reaches(dial(t, at, trust), codes.Unavailable, "who trusts the old authority")
	newTrust := ClientConfig{CAFile: others.File, CertFile: newClient.CertFile, KeyFile: newClient.KeyFile, TokenFile: token}
	second := dial(t, at, newTrust)
	reaches(second, codes.Unimplemented, "who trusts the new one")
	if err := errors.Join(answers(others, newClient)); err != nil {
		t.Errorf("HTTP with the new certificate: %v", err)
	}
	if answers(ours, client) == nil {
		t.Error("HTTP with the old certificate")
	}
	reaches(first, codes.Unimplemented, "who was connected before")
	healthy.SetServingStatus("", healthv1.HealthCheckResponse_NOT_SERVING)
	state(healthv1.HealthCheckResponse_NOT_SERVING)

	// Tokens, of the server and then of the client.
	const newToken = "admin-fedcba9876543210"
	replace(t, cfg.TokenFile, testkit.File(t, "file", "admin "+newToken+"\n"))
	later()
	reaches(second, codes.Unauthenticated, "with the old token")
	replace(t, token, testkit.File(t, "file", newToken))
	testkit.WaitFor(t, "the new token counts", func() bool { return status.Code(ask(t, second, method)) == codes.Unimplemented })
}

// A client uses the authorities and certificates that are current at the handshake.
func TestAClientReadsAgain(t *testing.T) {
	ours, others := testkit.NewAuthority(t), testkit.NewAuthority(t)
	of := func(servers, clients *testkit.Authority) string {
		cert := servers.Certificate("server")
		return serve(t, ServerConfig{CertFile: cert.CertFile, KeyFile: cert.KeyFile, ClientCAFile: clients.File})
	}
	before, after := of(ours, ours), of(others, others)
	cfg := ClientConfig{CAFile: testkit.File(t, "file", ""), CertFile: testkit.File(t, "file", ""), KeyFile: testkit.File(t, "file", "")}
	put := func(a *testkit.Authority) {
		pair := a.Certificate("client")
		replace(t, cfg.CAFile, a.File)
		replace(t, cfg.CertFile, pair.CertFile)
		replace(t, cfg.KeyFile, pair.KeyFile)
	}
	put(ours)
	options := testkit.Result(cfg.Load("")).Must(t)
	reaches := func(address string) codes.Code {
		conn := testkit.Result(grpc.NewClient(address, options...)).Must(t)
		defer conn.Close()
		return status.Code(ask(t, conn, srtmv1.AdminService_CreateTopic_FullMethodName))
	}
	testkit.Equal(t, reaches(before), codes.Unimplemented, "at first")
	testkit.Equal(t, reaches(after), codes.Unavailable, "a server of another authority")
	put(others)
	testkit.WaitFor(t, "the new authority counts", func() bool { return reaches(after) == codes.Unimplemented })
	testkit.Equal(t, reaches(before), codes.Unavailable, "a server of the authority that was replaced")
}

// Outside gRPC, too, a client uses the certificate that is current at the handshake. An unreadable
// file is reported, and the certificate and the token stay.
func TestAClientsCertificateIsReadAgain(t *testing.T) {
	a := testkit.NewAuthority(t)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.TLS.PeerCertificates[0].Subject.CommonName) // checked by the test
	}))
	server.TLS = &tls.Config{Certificates: []tls.Certificate{a.Certificate("server").TLS}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: a.Pool}
	server.StartTLS()
	defer server.Close()
	var cfg ClientConfig
	fs := flag.NewFlagSet("", flag.ContinueOnError)
	cfg.Flags(fs, "", "the server")
	testkit.Must(t, fs.Parse([]string{
		"--tls-ca=" + a.File, "--tls-cert=" + testkit.File(t, "cert", ""), "--tls-key=" + testkit.File(t, "key", ""), "--token-file=" + testkit.File(t, "token", adminToken),
	}))
	var lines testkit.Buffer
	cfg.Log(slog.New(slog.NewTextHandler(&lines, nil)))
	first, second := a.Certificate("first"), a.Certificate("second")
	replace(t, cfg.CertFile, first.CertFile)
	replace(t, cfg.KeyFile, first.KeyFile)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: testkit.Result(cfg.TLS("")).Must(t)}}
	served := func() string {
		t.Helper()
		r := testkit.Result(client.Get(server.URL)).Must(t)
		defer r.Body.Close()
		return string(testkit.Result(io.ReadAll(r.Body)).Must(t))
	}
	testkit.Equal(t, served(), "first", "at first")
	replace(t, cfg.CertFile, second.CertFile)
	testkit.WaitFor(t, "half a pair is reported", func() bool {
		testkit.Equal(t, served(), "first", "with half a pair")
		return strings.Contains(lines.String(), "stay in force")
	})
	replace(t, cfg.KeyFile, second.KeyFile)
	testkit.WaitFor(t, "the new certificate counts", func() bool { return served() == "second" })

	token := testkit.Result(cfg.Token("")).Must(t)
	testkit.Must(t, os.Remove(cfg.TokenFile))
	testkit.WaitFor(t, "a token file that is gone is reported", func() bool {
		testkit.Equal(t, token(), adminToken, "the token")
		return strings.Contains(lines.String(), "no such file")
	})
}
