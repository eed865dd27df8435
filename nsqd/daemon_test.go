package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	nsq "github.com/nsqio/go-nsq"

	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsq/wire"
)

// start runs an nsqd in this process on free ports, and stops it when t ends.
func start(t *testing.T, args ...string) *nsqd {
	t.Helper()
	args = append([]string{"--data-path=" + t.TempDir(), "--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0", "--https-address=127.0.0.1:0", "--broadcast-address=127.0.0.1", "--arrival-stamps=off", "--drain-timeout=1s", "--log-level=debug"}, args...)
	opts := new(options)
	_, level, err := opts.program().Parse(args, io.Discard)
	testkit.Must(t, err)
	d, err := open(t.Context(), opts, slog.New(slog.NewTextHandler(newTestLog(t), &slog.HandlerOptions{Level: level})), level)
	testkit.Must(t, err)
	testkit.Run(t, d.run)
	return d
}

// testLog writes to the test's log, which go test shows if the test fails. Lines logged after the test are dropped, for
// example the number of suppressed lines.
type testLog struct {
	t *testing.T

	mu   sync.Mutex
	over bool
}

func newTestLog(t *testing.T) *testLog {
	l := &testLog{t: t}
	t.Cleanup(func() {
		l.mu.Lock()
		l.over = true
		l.mu.Unlock()
	})
	return l
}

func (l *testLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.over {
		l.t.Log(strings.TrimSpace(string(p)))
	}
	return len(p), nil
}

func get(t *testing.T, c *http.Client, url string) (int, string) {
	t.Helper()
	return ask(t, c, http.MethodGet, url, "", "")
}

func client(t *testing.T, c *tls.Config) *http.Client {
	transport := &http.Transport{TLSClientConfig: c}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: testkit.Hang}
}

// Replaced certificates and authorities apply to every new client, including a client that resumes an earlier session.
// An unreadable file changes nothing, and the expiry is a metric.
func TestCertificatesAreReplacedWhileTheyAreUsed(t *testing.T) {
	ours, others := testkit.NewAuthority(t), testkit.NewAuthority(t)
	cert, key, roots := testkit.File(t, "cert", ""), testkit.File(t, "key", ""), testkit.File(t, "roots", "")
	put := func(to, from string) {
		t.Helper()
		testkit.Must(t, os.WriteFile(to+".new", testkit.Result(os.ReadFile(from)).Must(t), 0o600))
		testkit.Must(t, os.Rename(to+".new", to))
	}
	first := ours.Certificate("nsqd")
	put(cert, first.CertFile)
	put(key, first.KeyFile)
	put(roots, ours.File)
	d := start(t, "--tls-cert="+cert, "--tls-key="+key, "--tls-root-ca-file="+roots, "--tls-client-auth-policy=require-verify")
	sensor := &tls.Config{ServerName: "localhost", RootCAs: x509.NewCertPool(), Certificates: []tls.Certificate{ours.Certificate("sensor").TLS}, ClientSessionCache: tls.NewLRUClientSessionCache(1)}
	for _, file := range []string{ours.File, others.File} {
		sensor.RootCAs.AppendCertsFromPEM(testkit.Result(os.ReadFile(file)).Must(t))
	}
	web := "https://" + d.listeners.https.Addr().String()
	// ping is called with each client; the sensor resumes its session where possible.
	ping := func(as *tls.Config) error {
		r, err := (&http.Client{Transport: &http.Transport{TLSClientConfig: as, DisableKeepAlives: true}}).Get(web + "/ping")
		if err == nil {
			err = r.Body.Close()
		}
		return err
	}
	config := nsq.NewConfig()
	config.TlsV1, config.TlsConfig = true, sensor
	connected := testkit.Result(nsq.NewProducer(d.listeners.tcp.Addr().String(), config)).Must(t)
	connected.SetLoggerLevel(nsq.LogLevelMax)
	defer connected.Stop()
	testkit.NoError(t, connected.Publish("t", []byte("x")), "at first")
	testkit.NoError(t, ping(sensor), "HTTPS at first")
	testkit.NoError(t, ping(sensor), "HTTPS at first, resumed")

	second := others.Certificate("nsqd")
	put(cert, second.CertFile) // half a pair
	for range 3 {
		testkit.NoError(t, ping(sensor), "with half a pair")
	}
	put(key, second.KeyFile)
	put(roots, others.File)
	testkit.WaitFor(t, "who has a certificate of the authority that was replaced is refused", func() bool { return ping(sensor) != nil })
	testkit.NoError(t, connected.Publish("t", []byte("x")), "who was connected before")
	unverified := sensor.Clone()
	unverified.ClientSessionCache, unverified.Certificates = nil, []tls.Certificate{others.Certificate("sensor").TLS}
	testkit.NoError(t, ping(unverified), "a client with a certificate of the new authority")
	_, text := get(t, client(t, unverified), web+"/metrics")
	want := fmt.Sprintf("srtm_tls_certificate_expiry_timestamp_seconds %v", float64(second.TLS.Leaf.NotAfter.Unix()))
	if !strings.Contains(text, want) {
		t.Errorf("/metrics has no %s", want)
	}
}

func TestTLSFromFlags(t *testing.T) {
	a := testkit.NewAuthority(t)
	server, sensor := a.Certificate("nsqd"), a.Certificate("sensor7")
	for _, c := range []struct {
		flags      string
		plainTCP   bool // clients may publish without TLS
		plainHTTP  int  // status of a request without TLS
		needsProof bool // a client must present a certificate
	}{
		{"", true, 200, false},
		{"--tls-required", false, 403, false},
		{"--tls-required=true --tls-min-version=tls1.3", false, 403, false},
		{"--tls-required=tcp-https", false, 200, false},
		{"--tls-client-auth-policy=require", false, 403, true},
		{"--tls-client-auth-policy=require-verify", false, 403, true},
		{"--tls-client-auth-policy=require-verify --tls-required=tcp-https", false, 200, true},
	} {
		t.Run(c.flags, func(t *testing.T) {
			d := start(t, append(strings.Fields(c.flags), "--tls-cert="+server.CertFile, "--tls-key="+server.KeyFile, "--tls-root-ca-file="+a.File)...)
			publish := func(c *tls.Config) error {
				config := nsq.NewConfig()
				config.TlsV1, config.TlsConfig = c != nil, c
				p := testkit.Result(nsq.NewProducer(d.listeners.tcp.Addr().String(), config)).Must(t)
				p.SetLoggerLevel(nsq.LogLevelMax)
				defer p.Stop()
				return p.Publish("t", []byte("x"))
			}
			proof := &tls.Config{RootCAs: a.Pool, ServerName: "localhost", Certificates: []tls.Certificate{sensor.TLS}}
			none := &tls.Config{RootCAs: a.Pool, ServerName: "localhost"}
			if err := publish(nil); (err == nil) != c.plainTCP {
				t.Errorf("PUB in the clear: %v", err)
			}
			if err := publish(proof); err != nil {
				t.Errorf("PUB with a certificate: %v", err)
			}
			if err := publish(none); (err != nil) != c.needsProof {
				t.Errorf("PUB without a certificate: %v", err)
			}
			code, body := get(t, client(t, nil), "http://"+d.listeners.http.Addr().String()+"/ping")
			testkit.Equal(t, code, c.plainHTTP, "HTTP: %s", body)
			var answer struct {
				Message string
				Port    int `json:"https_port"`
			}
			if code == 403 {
				if err := json.Unmarshal([]byte(body), &answer); err != nil || answer.Message != "TLS_REQUIRED" || answer.Port != port(d.listeners.https) {
					t.Errorf("%s: %v", body, err)
				}
			}
			if code, body := get(t, client(t, proof), "https://"+d.listeners.https.Addr().String()+"/ping"); code != 200 || body != "OK" {
				t.Errorf("HTTPS: %d %s", code, body)
			}
			if r, err := client(t, none).Get("https://" + d.listeners.https.Addr().String() + "/ping"); (err != nil) != c.needsProof {
				t.Errorf("HTTPS without a certificate: %v", err)
			} else if err == nil {
				r.Body.Close()
			}
		})
	}
}

func TestTheLeastVersionOfTLS(t *testing.T) {
	a := testkit.NewAuthority(t)
	server := a.Certificate("nsqd")
	for flag, refused := range map[string]uint16{"tls1.2": tls.VersionTLS11, "TLS1.3": tls.VersionTLS12, "tls1.1": tls.VersionTLS10} {
		d := start(t, "--tls-cert="+server.CertFile, "--tls-key="+server.KeyFile, "--tls-min-version="+flag)
		for _, c := range []struct {
			most uint16
			want bool
		}{{refused, false}, {refused + 1, true}} {
			nc, err := tls.Dial("tcp", d.listeners.https.Addr().String(), &tls.Config{RootCAs: a.Pool, MinVersion: tls.VersionTLS10, MaxVersion: c.most, ServerName: "localhost"})
			if (err == nil) != c.want {
				t.Errorf("%s: a client of at most %s: %v", flag, tls.VersionName(c.most), err)
			}
			if err == nil {
				nc.Close()
			}
		}
	}
}

func TestUnixSockets(t *testing.T) {
	dir, err := os.MkdirTemp("", "nsqd") // a socket's path must be short
	testkit.Must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	for _, stamps := range []string{"off", "auto"} {
		t.Run(stamps, func(t *testing.T) {
			tcp, web := filepath.Join(dir, "tcp-"+stamps), filepath.Join(dir, "http-"+stamps)
			start(t, "--tcp-address="+tcp, "--http-address="+web, "--arrival-stamps="+stamps)
			nc := testkit.Result(net.Dial("unix", tcp)).Must(t)
			defer nc.Close()
			testkit.Must(t, nc.SetDeadline(time.Now().Add(testkit.Hang)))
			in := wire.AppendPub(wire.AppendMagic(nil), "t", []byte("x"))
			in = append(wire.AppendRdy(wire.AppendSub(in, "t", "c"), 1), "NONSENSE\n"...)
			testkit.Result(nc.Write(in)).Must(t)
			out, err := io.ReadAll(nc)
			if err != nil || bytes.Count(out, []byte("OK")) != 2 || !bytes.Contains(out, []byte("E_INVALID")) {
				t.Errorf("%q %v", out, err)
			}
			c := &http.Client{Timeout: testkit.Hang, Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return (&net.Dialer{}).DialContext(ctx, "unix", web)
			}}}
			code, body := get(t, c, "http://nsqd/info")
			var info struct {
				TCP  int `json:"tcp_port"`
				HTTP int `json:"http_port"`
			}
			if err := json.Unmarshal([]byte(body), &info); err != nil || code != 200 || info.TCP != -1 || info.HTTP != -1 {
				t.Errorf("%d %s %v", code, body, err)
			}
		})
		for _, f := range []string{"tcp-", "http-"} {
			if _, err := os.Lstat(filepath.Join(dir, f+stamps)); err == nil {
				t.Errorf("the socket %s%s is left over", f, stamps)
			}
		}
	}
}

func TestHTTPCanBeSwitchedOff(t *testing.T) {
	d := start(t, "--http-address=", "--https-address=")
	if d.listeners.http != nil || d.listeners.https != nil || d.listeners.tcp == nil {
		t.Errorf("%+v", d.listeners)
	}
}

// If a later step fails, nothing stays open.
func TestWhatCannotBeOpenedIsNamed(t *testing.T) {
	a := testkit.NewAuthority(t)
	c := a.Certificate("nsqd")
	taken := testkit.Listen(t).Addr().String()
	empty := testkit.File(t, "empty", "")
	pair := "--tls-cert=" + c.CertFile + " --tls-key=" + c.KeyFile
	used, odd := t.TempDir(), t.TempDir()
	start(t, "--data-path="+used)
	testkit.Must(t, os.WriteFile(filepath.Join(odd, "messages"), nil, 0o600))
	for args, want := range map[string]string{
		"--tcp-address=" + taken:                      "--tcp-address",
		"--http-address=" + taken:                     "--http-address",
		pair + " --https-address=" + taken:            "--https-address",
		"--tls-cert=/nope --tls-key=" + c.KeyFile:     "--tls-cert",
		"--tls-cert=" + empty + " --tls-key=" + empty: "--tls-cert",
		pair + " --tls-root-ca-file=/nope":            "--tls-root-ca-file",
		pair + " --tls-root-ca-file=" + empty:         "no certificate in",
		"--tcp-address=/dev/null/x":                   "--tcp-address",
		"--data-path=" + used:                         "another nsqd uses " + used,
		"--data-path=" + odd:                          "--data-path",
	} {
		args := append([]string{"--data-path=" + t.TempDir(), "--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0", "--https-address=127.0.0.1:0", "--arrival-stamps=off"}, strings.Fields(args)...)
		opts, err := parse(args...)
		var d *nsqd
		if err == nil {
			d, err = open(t.Context(), opts, slog.New(slog.DiscardHandler), new(slog.LevelVar))
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v does not name %s", args, err, want)
			if err == nil {
				d.close()
			}
		}
	}
}

func TestAuthFromFlags(t *testing.T) {
	a := testkit.NewAuthority(t)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost || r.FormValue("remote_ip") != "127.0.0.1" || r.FormValue("tls") != "false" {
			t.Errorf("asked with %s %v", r.Method, r.Form)
		}
		topic := "none"
		if r.FormValue("secret") == "open sesame" {
			topic = "^t$"
		}
		_, _ = fmt.Fprintf(w, `{"ttl":60,"authorizations":[{"permissions":["publish"],"topic":%q,"channels":[".*"]}]}`, topic)
	}))
	server.TLS = &tls.Config{Certificates: []tls.Certificate{a.Certificate("authserver").TLS}}
	server.StartTLS()
	t.Cleanup(server.Close)
	down := testkit.Listen(t)
	down.Close()
	d := start(t, "--auth-http-address="+down.Addr().String(), "--auth-http-address="+server.URL+"/who", "--auth-http-request-method=post", "--tls-root-ca-file="+a.File)
	for _, c := range []struct {
		secret, topic, want string
	}{
		{"open sesame", "t", ""},
		{"open sesame", "other", "E_UNAUTHORIZED"},
		{"guess", "t", "E_UNAUTHORIZED"},
		{"", "t", "Auth Required"}, // go-nsq's own words
	} {
		config := nsq.NewConfig()
		config.AuthSecret = c.secret
		p, err := nsq.NewProducer(d.listeners.tcp.Addr().String(), config)
		testkit.Must(t, err)
		p.SetLoggerLevel(nsq.LogLevelMax)
		if err := p.Publish(c.topic, []byte("x")); (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v", c, err)
		}
		p.Stop()
	}
}

// A subscriber that reads nothing is cut off at shutdown, and the shutdown still succeeds.
func TestAStuckSubscriberDoesNotFailTheShutdown(t *testing.T) {
	var c net.Conn
	t.Cleanup(func() { c.Close() }) // after the daemon's cleanup, which fails the test if the daemon returns an error
	d := start(t)
	c = testkit.Result(net.Dial("tcp", d.listeners.tcp.Addr().String())).Must(t)
	testkit.Result(c.Write(wire.AppendRdy(wire.AppendSub(wire.AppendMagic(nil), "t", "c"), 100))).Must(t)
	url := "http://" + d.listeners.http.Addr().String() + "/pub?topic=t"
	body := make([]byte, 1<<20)
	for range 20 { // more than the sockets' buffers take
		answer := testkit.Result(client(t, nil).Post(url, "", bytes.NewReader(body))).Must(t)
		answer.Body.Close()
	}
}

func TestSettingsAtRunTime(t *testing.T) {
	d := start(t, "--log-level=WARN", "--lookupd-tcp-address=127.0.0.1:1")
	c := client(t, nil)
	base := "http://" + d.listeners.http.Addr().String() + "/config/"
	expect := func(name, value string, status int, want string) {
		t.Helper()
		if code, body := ask(t, c, http.MethodPut, base+name, value, ""); code != status || !strings.HasPrefix(body, want) {
			t.Errorf("PUT %s %s: %d %s", name, value, code, body)
		}
	}
	if _, body := get(t, c, base+"log_level"); strings.TrimSpace(body) != "3" {
		t.Errorf("log level %s", body)
	}
	expect("log_level", "debug", 200, "1")
	expect("log_level", "loud", 400, `{"message":"INVALID_VALUE"`)
	if !d.log.Enabled(t.Context(), slog.LevelDebug) || !d.log.With("a", 1).WithGroup("g").Enabled(t.Context(), slog.LevelDebug) {
		t.Error("debug is not logged")
	}
	expect("log_level", "fatal", 200, "5")
	if d.log.Enabled(t.Context(), slog.LevelError) {
		t.Error("errors are logged")
	}
	const name = "nsqlookupd_tcp_addresses"
	if _, body := get(t, c, base+name); strings.TrimSpace(body) != `["127.0.0.1:1"]` {
		t.Errorf("addresses %s", body)
	}
	for _, bad := range []string{"x", `[1]`, `{"a":1}`, `["nowhere"]`, `["a:1","nowhere"]`} {
		expect(name, bad, 400, `{"message":"INVALID_VALUE"`)
	}
	if _, body := get(t, c, base+name); strings.TrimSpace(body) != `["127.0.0.1:1"]` {
		t.Errorf("addresses %s", body)
	}
	expect(name, `[]`, 200, "[]")
	expect(name, `["127.0.0.1:2"]`, 200, `["127.0.0.1:2"]`)
	if got := d.announcer.Addresses(); len(got) != 1 || got[0] != "127.0.0.1:2" {
		t.Errorf("%v", got)
	}
}

// The broker announces the addresses for other programs to dial. /info has the addresses that the broker listens on.
func TestTopicsAreAnnounced(t *testing.T) {
	ln := testkit.Listen(t)
	said := make(chan string, 100)
	done := make(chan struct{})
	t.Cleanup(func() { <-done }) // after nsqd, which is started later, has ended
	go func() {
		defer close(done)
		nc, err := ln.Accept()
		if err != nil {
			return
		}
		defer nc.Close()
		buf := make([]byte, 1024)
		for {
			n, err := nc.Read(buf)
			if err != nil {
				return
			}
			said <- string(buf[:n])
			answer := "\x00\x00\x00\x02OK"
			if strings.HasPrefix(string(buf[:n]), "  V1") {
				answer = "\x00\x00\x00\x02{}"
			}
			for range strings.Count(string(buf[:n]), "\n") {
				if _, err := nc.Write([]byte(answer)); err != nil {
					return
				}
			}
		}
	}()
	d := start(t, "--lookupd-tcp-address="+ln.Addr().String(), "--broadcast-tcp-port=1234", "--broadcast-http-port=1235")
	if hello := <-said; !strings.Contains(hello, `"broadcast_address":"127.0.0.1"`) || !strings.Contains(hello, `"http_port":1235,"tcp_port":1234`) {
		t.Errorf("%q", hello)
	}
	topic, err := d.broker.CreateTopic("t")
	testkit.Must(t, err)
	testkit.Equal(t, <-said, "REGISTER t\n")
	testkit.Must(t, topic.CreateChannel("c"))
	testkit.Equal(t, <-said, "REGISTER t c\n")
	_, body := get(t, client(t, nil), "http://"+d.listeners.http.Addr().String()+"/info")
	var info struct {
		TCP     int `json:"tcp_port"`
		HTTP    int `json:"http_port"`
		Version string
	}
	if err := json.Unmarshal([]byte(body), &info); err != nil || info.TCP != port(d.listeners.tcp) || info.HTTP != port(d.listeners.http) || info.Version != program.NSQ {
		t.Errorf("%s %v", body, err)
	}
}

func TestFiguresGoToStatsd(t *testing.T) {
	udp := testkit.Result(net.ListenPacket("udp", "127.0.0.1:0")).Must(t)
	t.Cleanup(func() { udp.Close() })
	d := start(t, "--statsd-address="+udp.LocalAddr().String(), "--statsd-interval=10ms", "--statsd-prefix=a.%s.b", "--statsd-mem-stats=false")
	testkit.Result(d.broker.CreateTopic("t")).Must(t)
	testkit.Must(t, udp.SetReadDeadline(time.Now().Add(testkit.Hang)))
	buf := make([]byte, 1024)
	n, _, err := udp.ReadFrom(buf)
	want := fmt.Sprintf("a.127_0_0_1_%d.b.topic.t.message_count:0|c\n", port(d.listeners.http))
	if err != nil || !strings.HasPrefix(string(buf[:n]), want) {
		t.Errorf("%q, want %q; %v", buf[:n], want, err)
	}
}

// once runs an nsqd with a folder, stops the nsqd again and returns its error.
func once(t *testing.T, data string, use func(*nsqd), args ...string) error {
	t.Helper()
	args = append([]string{"--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0", "--arrival-stamps=off", "--drain-timeout=0s", "--data-path=" + data}, args...)
	opts := testkit.Result(parse(args...)).Must(t)
	d := testkit.Result(open(t.Context(), opts, slog.New(slog.NewTextHandler(newTestLog(t), nil)), new(slog.LevelVar))).Must(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- d.run(ctx) }()
	use(d)
	cancel()
	return <-done
}

// post sends an HTTP POST request.
func post(t *testing.T, d *nsqd, path, body string) {
	t.Helper()
	if code, answer := ask(t, client(t, nil), http.MethodPost, "http://"+d.listeners.http.Addr().String()+path, body, ""); code != http.StatusOK {
		t.Fatalf("%s: %d %s", path, code, answer)
	}
}

func TestMessagesThatCannotBeStoredAtTheEndAreAFailure(t *testing.T) {
	data := t.TempDir()
	err := once(t, data, func(d *nsqd) {
		post(t, d, "/pub?topic=t", "x")
		// An operator replaces the messages folder with a file.
		testkit.Must(t, os.RemoveAll(filepath.Join(data, "messages")))
		testkit.Must(t, os.WriteFile(filepath.Join(data, "messages"), nil, 0o600))
	})
	if err == nil || !strings.Contains(err.Error(), "lost") || !strings.Contains(err.Error(), "topic t has lost 1 message:") {
		t.Errorf("it ended with %v, and a message is lost", err)
	}
}

// A backlog that waits for tokens keeps waiting after a restart.
func TestARestartKeepsToTheContract(t *testing.T) {
	data := t.TempDir()
	expect := func(d *nsqd) {
		t.Helper()
		topic := testkit.Result(d.broker.Topic([]byte("t"))).Must(t)
		if s := topic.Stats(); s.Counters.Released != 0 || s.Waiting != 50 {
			t.Errorf("released %d, waiting %d; want 0, 50", s.Counters.Released, s.Waiting)
		}
	}
	const limit = "--topic-limit=t:0.001:2"
	testkit.NoError(t, once(t, data, func(d *nsqd) {
		post(t, d, "/channel/create?topic=t&channel=c", "")
		post(t, d, "/mpub?topic=t", strings.Repeat("x\n", 50))
		expect(d)
	}, limit))
	testkit.NoError(t, once(t, data, expect, limit))
}

// No other user on the machine can read messages, contracts and traces.
func TestWhatABrokerLeavesIsItsOwn(t *testing.T) {
	dir := t.TempDir()
	t.Cleanup(func() { // the broker has ended
		left := testkit.Private(t, dir)
		for _, kind := range []string{".json", ".seg", ".trace", ""} { // "": the lock
			if left[kind] == 0 {
				t.Errorf("files left by ending: %v, want one of %q", left, kind)
			}
		}
	})
	d := start(t, "--data-path="+dir, "--mem-queue-size=0", "--topic-limit=t:1000:5", "--release-trace="+filepath.Join(dir, "release.trace"))
	c := client(t, nil)
	web := "http://" + d.listeners.http.Addr().String()
	for _, path := range []string{"/topic/create?topic=t", "/channel/create?topic=t&channel=c"} {
		if r, err := c.Post(web+path, "", nil); err != nil || r.Body.Close() != nil || r.StatusCode != 200 {
			t.Fatalf("%s: %v %v", path, r, err)
		}
	}
	for range 10 {
		if r, err := c.Post(web+"/pub?topic=t", "", strings.NewReader("secret")); err != nil || r.Body.Close() != nil || r.StatusCode != 200 {
			t.Fatalf("publish: %v %v", r, err)
		}
	}
}

func TestAFolderOfNSQIsTakenOver(t *testing.T) {
	dir := t.TempDir()
	text := `{"topics":[{"name":"t","paused":false,"channels":[{"name":"c","paused":true}]}],"version":"1.3.0"}`
	testkit.Must(t, os.WriteFile(filepath.Join(dir, "nsqd.dat"), []byte(text), 0o600))
	d := start(t, "--data-path="+dir)
	_, stats := get(t, client(t, nil), "http://"+d.listeners.http.Addr().String()+"/stats?format=json")
	if !strings.Contains(stats, `"channel_name":"c"`) || !strings.Contains(stats, `"paused":true`) {
		t.Errorf("got %s", stats)
	}
}

func TestTopicsAndChannelsAreBounded(t *testing.T) {
	d := start(t, "--max-topics=1", "--max-topic-channels=1")
	c, base := client(t, nil), "http://"+d.listeners.http.Addr().String()
	for _, want := range []struct {
		path string
		code int
		text string
	}{
		{"/pub?topic=t", 200, "OK"},
		{"/channel/create?topic=t&channel=c", 200, ""},
		{"/pub?topic=u", 503, "TOO_MANY_TOPICS"},
		{"/topic/create?topic=u", 503, "TOO_MANY_TOPICS"},
		{"/channel/create?topic=t&channel=d", 503, "TOO_MANY_CHANNELS"},
		{"/pub?topic=t", 200, "OK"},
	} {
		if code, body := ask(t, c, http.MethodPost, base+want.path, "x", ""); code != want.code || !strings.Contains(body, want.text) {
			t.Errorf("%s: %d %s, want %d %s", want.path, code, body, want.code, want.text)
		}
	}
	_, metrics := get(t, c, base+"/metrics")
	for _, want := range []string{`srtm_nsqd_names_refused_total{kind="topic"} 2`, `srtm_nsqd_names_refused_total{kind="channel"} 1`} {
		if !strings.Contains(metrics, want) {
			t.Errorf("no %s", want)
		}
	}
}
