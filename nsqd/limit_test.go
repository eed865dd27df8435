package main

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/bounded"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/conn"
)

func TestConnectionsFitTheDescriptorsAndTheMemory(t *testing.T) {
	for _, c := range []struct {
		descriptors, memory int64
		given               options
		clients, web        int
	}{
		{1024, math.MaxInt64, options{}, 768, 128},
		{65536, math.MaxInt64, options{}, 55536, 5000},
		{1 << 20, math.MaxInt64, options{}, 1<<20 - 10_000, 5000},
		{1 << 20, 6 << 30, options{}, 393216, 5000},
		{1 << 20, 384 << 20, options{}, 24576, 5000},
		{math.MaxInt64, math.MaxInt64, options{}, math.MaxInt32, 5000},
		{1, 1, options{}, 1, 1},
		{1024, 1 << 30, options{conn: conn.Config{MaxConnections: 2000}, addresses: addresses{maxHTTP: 7}}, 2000, 7},
	} {
		c.given.fit(c.descriptors, c.memory)
		if c.given.conn.MaxConnections != c.clients || c.given.addresses.maxHTTP != c.web {
			t.Errorf("%d descriptors, %d bytes: %d and %d connections, want %d and %d", c.descriptors, c.memory, c.given.conn.MaxConnections, c.given.addresses.maxHTTP, c.clients, c.web)
		}
	}
	if n := bounded.Descriptors(); n < 3 {
		t.Errorf("%d descriptors", n)
	}
}

// A request holds its connection until the connection is closed. Then another request has its turn.
func TestHTTPConnectionsAreBounded(t *testing.T) {
	d := start(t, "--max-http-connections=1", "--admin-http-address=127.0.0.1:0")
	ask := func(ln net.Listener) (net.Conn, int, string) {
		t.Helper()
		nc := testkit.Result(net.Dial("tcp", ln.Addr().String())).Must(t)
		t.Cleanup(func() { nc.Close() })
		testkit.Must(t, nc.SetDeadline(time.Now().Add(testkit.Hang)))
		// The broker may have closed the connection already, after sending its answer.
		_, _ = io.WriteString(nc, "GET /metrics HTTP/1.1\r\nHost: nsqd\r\n\r\n")
		r, err := http.ReadResponse(bufio.NewReader(nc), nil)
		if err != nil {
			return nc, 0, err.Error() // reset, if the request was faster than the answer
		}
		defer r.Body.Close()
		body := testkit.Result(io.ReadAll(r.Body)).Must(t)
		return nc, r.StatusCode, string(body)
	}
	first, code, body := ask(d.listeners.http)
	testkit.MustEqual(t, code, 200, "%s", body)
	const others = 5
	for range others {
		if _, code, body := ask(d.listeners.http); code != 0 && (code != 503 || !strings.Contains(body, "TOO_MANY_CONNECTIONS")) {
			t.Errorf("%d %s", code, body)
		}
	}
	operator, code, metrics := ask(d.listeners.admin) // has its own limit
	for _, want := range []string{"srtm_nsqd_http_connections 2", fmt.Sprintf("srtm_nsqd_http_connections_refused_total %d", others)} {
		if code != 200 || !strings.Contains(metrics, want+"\n") {
			t.Errorf("%d, no %s", code, want)
		}
	}
	first.Close()
	testkit.WaitFor(t, "room after the first connection was closed", func() bool {
		_, code, _ := ask(d.listeners.http)
		return code == 200
	})
	operator.Close()
}

// Publishers that wait for a slow auth server leave half of the HTTP connections, and of the reserved file descriptors,
// to others.
func TestPublishersThatWaitForAuth(t *testing.T) {
	const connections = 8
	asked, over := make(chan struct{}, 2*connections), make(chan struct{})
	slow := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked <- struct{}{}; <-over }))
	defer slow.Close()
	defer close(over)
	d := start(t, fmt.Sprint("--max-http-connections=", connections), "--auth-http-address="+slow.Listener.Addr().String())
	answers := make(chan string, connections)
	for i := range connections {
		nc := testkit.Result(net.Dial("tcp", d.listeners.http.Addr().String())).Must(t)
		defer nc.Close()
		testkit.Result(fmt.Fprintf(nc, "POST /pub?topic=t HTTP/1.1\r\nHost: nsqd\r\nAuthorization: Bearer secret%d\r\nContent-Length: 1\r\n\r\nx", i)).Must(t)
		go func() {
			r, err := http.ReadResponse(bufio.NewReader(nc), nil)
			if err == nil {
				body, _ := io.ReadAll(r.Body)
				answers <- string(body)
			}
		}()
	}
	for range connections / 2 {
		<-asked
	}
	for range connections / 2 {
		select {
		case answer := <-answers:
			if !strings.Contains(answer, "AUTH_BUSY") {
				t.Error(answer)
			}
		case <-asked:
			t.Fatal("more than half of the connections wait")
		}
	}
}
