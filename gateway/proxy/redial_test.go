package proxy

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// closedAt returns the URL of a server that refuses connections.
func closedAt(t *testing.T) string {
	s := httptest.NewServer(nil)
	s.Close()
	return s.URL
}

// several is a policy of servers, and requests that cost 10 of 100 percent.
func several(urls ...string) string {
	var b strings.Builder
	for _, url := range urls {
		fmt.Fprintf(&b, "[[server]]\nurl = %q\ncpu = 1000\n", url)
	}
	return b.String() + "[[cost]]\npath = \"/\"\ncpu = 20\n"
}

// A server that cannot be reached costs no answer while another can, and what was asked
// for comes whole: method, path, query, Host and body. It is settled once.
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

// Each server is tried once, and then there is an answer.
func TestNoServerIsReached(t *testing.T) {
	g := serve(t, several(closedAt(t), closedAt(t), closedAt(t)), nil)
	if res, _ := g.get(t, "/"); res.StatusCode != http.StatusBadGateway {
		t.Error(res.Status)
	}
	g.idle(t)
	for _, v := range g.Status().Servers {
		if v.Sent != 1 || v.Failed != 1 {
			t.Errorf("%+v", v)
		}
	}
}

// What has been sent is not sent again: a server that takes the request and ends the
// connection may have served it.
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
			_, _ = c.Read(make([]byte, 1)) // what it says is of no interest
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
