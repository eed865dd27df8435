package main

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// outside returns an address of this host that is not loopback.
func outside(t *testing.T) string {
	t.Helper()
	all := testkit.Result(net.InterfaceAddrs()).Must(t)
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil && !n.IP.IsLoopback() && !n.IP.IsLinkLocalUnicast() {
			return n.IP.String()
		}
	}
	t.Skip("this host has no address beyond loopback; nsqd/httpapi goes through the rules")
	return ""
}

// ask sends an HTTP request and returns the status and the body.
func ask(t *testing.T, c *http.Client, method, url, body, token string) (int, string) {
	t.Helper()
	r := testkit.Result(http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))).Must(t)
	if token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	answer := testkit.Result(c.Do(r)).Must(t)
	defer answer.Body.Close()
	return answer.StatusCode, string(testkit.Result(io.ReadAll(answer.Body)).Must(t))
}

// A client that reaches an nsqd on all interfaces can use NSQ's API and cannot change a contract.
func TestAContractIsNotChangedFromElsewhere(t *testing.T) {
	ip := outside(t)
	d := start(t, "--http-address=0.0.0.0:0", "--topic-limit=t:1:2")
	_, port, err := net.SplitHostPort(d.listeners.http.Addr().String())
	testkit.Must(t, err)
	web := client(t, nil)
	const limit = "/topic/limit?topic=t&rate=1000000&burst=1000"
	if code, body := ask(t, web, "POST", "http://"+ip+":"+port+limit, "x", ""); code != 403 || !strings.Contains(body, "NOT_LOCAL") {
		t.Errorf("from %s: %d %s", ip, code, body)
	}
	for _, path := range []string{"/topic/pause?topic=t", "/topic/delete?topic=t", "/topic/create?topic=t", "/pub?topic=t"} {
		if code, body := ask(t, web, "POST", "http://"+ip+":"+port+path, "x", ""); code != 200 {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
	topic := testkit.Result(d.broker.Topic([]byte("t"))).Must(t)
	if s := topic.Stats(); s.Share.Rate != 1000 || s.Share.Burst != 2 {
		t.Errorf("the contract of the flag is %+v now", s.Share)
	}
	if code, body := ask(t, web, "POST", "http://127.0.0.1:"+port+limit, "x", ""); code != 200 {
		t.Errorf("from loopback: %d %s", code, body)
	}
}

func TestAnAddressForAdministrators(t *testing.T) {
	const token = "admin-0123456789abcdef"
	dir := t.TempDir()
	socket, tokens := filepath.Join(dir, "admin.http"), filepath.Join(dir, "tokens")
	testkit.Must(t, os.WriteFile(tokens, []byte("admin "+token+"\n"), 0o600))
	unix := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}}
	a := testkit.NewAuthority(t)
	cert := a.Certificate("nsqd")
	for name, c := range map[string]struct {
		flags        []string
		withoutToken int // status
	}{
		"alone":       {nil, 200},
		"with tokens": {[]string{"--http-token-file=" + tokens}, 401},
	} {
		t.Run(name, func(t *testing.T) {
			d := start(t, append(c.flags, "--admin-http-address="+socket, "--tls-cert="+cert.CertFile, "--tls-key="+cert.KeyFile)...)
			public := map[string]*http.Client{
				"http://" + d.listeners.http.Addr().String():   client(t, nil),
				"https://" + d.listeners.https.Addr().String(): client(t, &tls.Config{RootCAs: a.Pool, ServerName: "localhost"}),
			}
			for _, path := range []string{"/topic/create?topic=t", "/topic/limit?topic=t&rate=1&burst=1", "/topic/delete?topic=t"} {
				for at, by := range public {
					if code, body := ask(t, by, "POST", at+path, "x", token); code != 403 || !strings.Contains(body, "ADMIN_ADDRESS") {
						t.Errorf("%s%s: %d %s", at, path, code, body)
					}
				}
				if code, body := ask(t, unix, "POST", "http://nsqd"+path, "x", ""); code != c.withoutToken {
					t.Errorf("%s: %d %s", path, code, body)
				}
				if code, body := ask(t, unix, "POST", "http://nsqd"+path, "x", token); code != 200 && code != 404 {
					t.Errorf("%s with a token: %d %s", path, code, body)
				}
			}
			for at, by := range public {
				for path, method := range map[string]string{"/pub?topic=t": "POST", "/mpub?topic=t": "POST", "/ping": "GET", "/info": "GET", "/stats": "GET", "/metrics": "GET"} {
					if code, body := ask(t, by, method, at+path, "x", ""); code != 200 {
						t.Errorf("%s%s: %d %s", at, path, code, body)
					}
				}
			}
		})
	}
}

// If TLS is required, an operator needs no TLS at the administrators' address. All other callers need TLS.
func TestMetricsInClear(t *testing.T) {
	a := testkit.NewAuthority(t)
	cert, sensor := a.Certificate("nsqd"), a.Certificate("sensor7")
	for _, policy := range []string{"--tls-required", "--tls-client-auth-policy=require-verify"} {
		d := start(t, policy, "--tls-root-ca-file="+a.File, "--admin-http-address=127.0.0.1:0", "--tls-cert="+cert.CertFile, "--tls-key="+cert.KeyFile)
		plain := client(t, nil)
		encrypted := client(t, &tls.Config{RootCAs: a.Pool, ServerName: "localhost", Certificates: []tls.Certificate{sensor.TLS}})
		admin := d.listeners.admin.Addr().String()
		for request, want := range map[string][3]int{ // without TLS at the clients' address, without TLS at the administrators' address, there with TLS
			"GET /metrics":                {403, 200, 200},
			"GET /healthz":                {403, 200, 200},
			"POST /metrics":               {403, 403, 404},
			"GET /stats":                  {403, 403, 200},
			"GET /debug/state":            {403, 403, 200},
			"POST /pub?topic=t":           {403, 403, 200},
			"POST /topic/create?topic=t":  {403, 403, 200},
			"GET /metrics/../debug/state": {403, 403, 200},
		} {
			method, path, _ := strings.Cut(request, " ")
			for i, got := range [3]func() (int, string){
				func() (int, string) {
					return ask(t, plain, method, "http://"+d.listeners.http.Addr().String()+path, "x", "")
				},
				func() (int, string) { return ask(t, plain, method, "http://"+admin+path, "x", "") },
				func() (int, string) { return ask(t, encrypted, method, "https://"+admin+path, "x", "") },
			} {
				if code, body := got(); code != want[i] || code == 403 && !strings.Contains(body, "TLS_REQUIRED") {
					t.Errorf("%s: %s, %d: %d %.100s, want %d", policy, request, i, code, body, want[i])
				}
			}
		}
	}
}
