//go:build !race

package proxy

import (
	"bytes"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// Counts the allocations of a request beyond a bare ReverseProxy. The client and the server allocate
// nothing: each recognizes the other's message by its end.
func TestAllocations(t *testing.T) {
	until := func(c net.Conn, buf []byte, end string) bool {
		for n := 0; ; {
			m, err := c.Read(buf[n:])
			if n += m; bytes.HasSuffix(buf[:n], []byte(end)) {
				return true
			}
			if err != nil {
				return false
			}
		}
	}
	ln := testkit.Listen(t)
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				answer, buf := []byte("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nTRUE"), make([]byte, 4096)
				defer c.Close()
				for until(c, buf, "\r\n\r\n") {
					_, _ = c.Write(answer)
				}
			}()
		}
	}()
	server := &url.URL{Scheme: "http", Host: ln.Addr().String()}
	transport := &http.Transport{DisableCompression: true}
	t.Cleanup(transport.CloseIdleConnections)
	bare := httptest.NewServer(&httputil.ReverseProxy{Transport: transport, Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(server) }})
	t.Cleanup(bare.Close)
	of := func(at string) float64 {
		c, _ := (&gateway{at: at}).dial(t)
		ask, buf := []byte("GET / HTTP/1.1\r\nHost: x\r\nUser-Agent: y\r\n\r\n"), make([]byte, 4096)
		return testing.AllocsPerRun(1000, func() {
			if _, err := c.Write(ask); err != nil || !until(c, buf, "TRUE") {
				t.Fatal("no answer", err)
			}
		})
	}
	plain := of(bare.Listener.Addr().String())
	// Four allocations come from the transport's bound on an answer's header, which the bare proxy
	// lacks.
	if more := of(serve(t, one(server.String()), nil).at) - plain; more > 4 {
		t.Errorf("%v allocations more than the %v of a bare ReverseProxy", more, plain)
	}
}
