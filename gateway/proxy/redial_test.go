package proxy

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/srtm-io/srtm/gateway/balance"
	"github.com/srtm-io/srtm/internal/testkit"
)

// closedAt returns the URL of a server that refuses connections.
func closedAt(t *testing.T) string {
	return "http://" + testkit.Address(t)
}

// several is a policy of several servers. Each request costs 10 of 100 percent.
func several(urls ...string) string {
	var b strings.Builder
	for _, url := range urls {
		fmt.Fprintf(&b, "[[server]]\nurl = %q\ncpu = 1000\n", url)
	}
	return b.String() + "[[cost]]\npath = \"/\"\ncpu = 20\n"
}

// While another server can be reached, an unreachable server costs no answer. The request arrives
// whole: method, path, query, Host and body. The request is settled once.
func TestUnreachableServer(t *testing.T) {
	alive := backend(t, func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		fmt.Fprintf(w, "%s %s %s %s %v", r.Method, r.RequestURI, r.Host, body, err)
	})
	g := serve(t, several(closedAt(t)+"/a", closedAt(t)+"/b", alive+"/c"), nil)
	const n = 30
	for i := range n {
		c, r := g.dial(t)
		write(t, c, "POST /x%2Fy?z=1 HTTP/1.1\r\nHost: shop.example\r\nContent-Length: 5\r\n\r\nhello")
		res, body := answer(t, r)
		if res.StatusCode != http.StatusOK || body != "POST /c/x%2Fy?z=1 shop.example hello <nil>" {
			t.Fatalf("request %d: %d, %q", i, res.StatusCode, body)
		}
		c.Close()
	}
	g.idle(t)
	s := g.Status()
	if c := s.Classes[0]; c.Sent != n || c.Used["cpu"] != n*10 {
		t.Errorf("%d requests were sent, which took %v: want %d, %d", c.Sent, c.Used, n, n*10)
	}
	for i, v := range s.Servers {
		if v.Sent != v.Departed+v.Failed || (i < 2) != (v.Departed == 0) || i < 2 && v.Failed < 5 {
			t.Errorf("%+v", v)
		}
	}
}

// Each server is tried once, and then the client gets an answer.
func TestNoServerIsReached(t *testing.T) {
	g := serve(t, several(closedAt(t), closedAt(t), closedAt(t)), nil)
	if res, _ := g.get(t, "/"); res.StatusCode != http.StatusBadGateway {
		t.Error(res.Status)
	}
	g.idle(t)
	if used := g.Status().Classes[0].Used["cpu"]; used > 0.01 {
		t.Errorf("its class was charged %v %%, and no server worked on it", used)
	}
	for _, v := range g.Status().Servers {
		if v.Sent != 1 || v.Failed != 1 {
			t.Errorf("%+v", v)
		}
	}
}

// The gateway never resends a request. A server may have served a request even if it closes the
// connection without an answer.
func TestWhatWasSentIsNotSentAgain(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	testkit.Must(t, err)
	defer ln.Close()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_, _ = c.Read(make([]byte, 1)) // the test ignores what the peer says
			c.Close()
		}
	}()
	g := serve(t, several("http://"+ln.Addr().String(), "http://"+ln.Addr().String()+"/other"), nil)
	c, r := g.dial(t)
	write(t, c, "POST / HTTP/1.1\r\nHost: shop.example\r\nContent-Length: 2\r\n\r\nhi")
	if res, _ := answer(t, r); res.StatusCode != http.StatusBadGateway {
		t.Error(res.Status)
	}
	g.idle(t)
	if s := g.Status(); s.Servers[0].Sent+s.Servers[1].Sent != 1 {
		t.Errorf("%+v", s.Servers)
	}
}

// idleServer is a server that keeps n connections open after an answer on each, and hangs up on /poison
// without an answer. poisoned counts the hang-ups. refuse makes the server accept no more connections.
func idleServer(t *testing.T, n int) (url string, keep func(*gateway), poisoned *atomic.Int64, refuse func()) {
	poisoned = new(atomic.Int64)
	arrived, all := make(chan struct{}), make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/poison" {
			poisoned.Add(1)
			panic(http.ErrAbortHandler)
		}
		arrived <- struct{}{}
		<-all
	}))
	t.Cleanup(s.Close)
	keep = func(g *gateway) {
		var clients sync.WaitGroup
		for range n {
			clients.Go(func() { g.get(t, "/") })
		}
		for range n {
			<-arrived
		}
		close(all)
		clients.Wait()
		g.idle(t)
	}
	return s.URL, keep, poisoned, func() { _ = s.Listener.Close() }
}

// A server that hangs up on a request may have closed an idle connection. A server that hangs up
// repeatedly rejects the request itself.
func TestWhatServersHangUpOnIsSentAgainAFewTimes(t *testing.T) {
	url, keep, poisoned, _ := idleServer(t, 8)
	g := serve(t, several(url), nil)
	keep(g)
	if res, _ := g.get(t, "/poison"); res.StatusCode != http.StatusBadGateway {
		t.Error(res.Status)
	}
	testkit.Equal(t, poisoned.Load(), 4, "times it was sent")
	g.idle(t)
	if s := g.Status().Servers[0]; s.Sent != 9 || s.Failed != 1 || s.Resent != 3 {
		t.Errorf("%+v", s)
	}
	if res, _ := g.get(t, "/poison", "Content-Length: 1", "", "x"); res.StatusCode != http.StatusBadGateway || poisoned.Load() != 5 {
		t.Errorf("with a body: %s, %d", res.Status, poisoned.Load()-4)
	}
}

// A request that a server may have received goes to no other server, even if the first server accepts
// no more connections. The request may have ended the server.
func TestWhatAServerHungUpOnGoesToNoOther(t *testing.T) {
	url, keep, poisoned, refuse := idleServer(t, 2)
	g := serve(t, several(url), func(c *Config) { c.Balance = balance.RoundRobin })
	keep(g)
	refuse()
	var elsewhere atomic.Int64
	other := backend(t, func(http.ResponseWriter, *http.Request) { elsewhere.Add(1) })
	testkit.Must(t, g.SetPolicy(parse(t, several(url, other))))
	for asked := int64(1); poisoned.Load() == 0; asked++ {
		res, _ := g.get(t, "/poison")
		if n := poisoned.Load(); n > 0 && (res.StatusCode != http.StatusBadGateway || n != 2 || elsewhere.Load() == asked) {
			t.Errorf("%s, sent %d times, and %d of %d elsewhere", res.Status, n, elsewhere.Load(), asked)
		}
	}
}
