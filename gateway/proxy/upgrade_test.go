package proxy

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/testkit"
)

// A request for another protocol may have a chunked body. The body reaches the server before
// the tunnel opens. This also works with TLS, where such a connection otherwise ends with the answer.
func TestUpgradeWithAChunkedBody(t *testing.T) {
	url := backend(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		c, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		fmt.Fprintf(rw, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: lines\r\n\r\nbody %s\n", body)
		for rw.Flush() == nil {
			line, err := rw.ReadString('\n')
			if err != nil {
				return
			}
			fmt.Fprint(rw, "echo "+line)
		}
	})
	authority := testkit.NewAuthority(t)
	certificate := authority.Certificate("gateway")
	for name, security := range map[string]secure.ServerConfig{"clear": {}, "TLS": {CertFile: certificate.CertFile, KeyFile: certificate.KeyFile, HTTPTLS: true}} {
		t.Run(name, func(t *testing.T) {
			g := serveSecured(t, one(url), nil, security)
			c, _ := g.dial(t)
			testkit.Must(t, c.SetDeadline(time.Now().Add(testkit.Hang)))
			if security.HTTPTLS {
				c = tls.Client(c, &tls.Config{RootCAs: authority.Pool, ServerName: "gateway"})
			}
			write(t, c, "POST /lines HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: lines\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n")
			r := bufio.NewReader(c)
			res, err := http.ReadResponse(r, nil)
			if err != nil || res.StatusCode != http.StatusSwitchingProtocols || !slices.Equal(res.Header["Connection"], []string{"Upgrade"}) {
				t.Fatalf("%v, %v", res, err)
			}
			for _, want := range []string{"body hi\n", "echo hello\n"} {
				testkit.Result(r.ReadString('\n')).MustEqual(t, want)
				write(t, c, "hello\n")
			}
			g.idle(t)
			c.Close()
			g.tunnels.Wait()
		})
	}
}

// No client may upgrade to another HTTP version with a server. Its requests after the upgrade would
// have no class and could claim anything about the client.
func TestNoUpgradeToHTTP(t *testing.T) {
	url := backend(t, func(w http.ResponseWriter, r *http.Request) {
		if asked := r.Header.Get("Upgrade"); asked != "" {
			w.Header().Set("Connection", "Upgrade")
			w.Header().Set("Upgrade", asked)
			w.WriteHeader(http.StatusSwitchingProtocols)
		}
	})
	g := serve(t, one(url), nil)
	for asked, want := range map[string]int{
		"h2c": http.StatusOK, "H2C": http.StatusOK, "websocket , h2c": http.StatusOK, "HTTP/2.0": http.StatusOK, "TLS/1.0, HTTP/1.1": http.StatusOK,
		"websocket": http.StatusSwitchingProtocols,
	} {
		c, r := g.dial(t)
		write(t, c, "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: "+asked+"\r\nHTTP2-Settings: AAMAAABk\r\n\r\n")
		if res := testkit.Result(http.ReadResponse(r, nil)).Must(t); res.StatusCode != want {
			t.Errorf("%s: %d, want %d", asked, res.StatusCode, want)
		}
		c.Close()
	}
}
