package main

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"sync/atomic"

	"github.com/srtm-io/srtm/nsqd/httpapi"
)

// either is a listener for TLS and for plain connections. The first byte of a connection decides.
type either struct {
	net.Listener
	config *tls.Config
}

func (l either) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &eitherConn{Conn: c, config: l.config}, nil
}

type eitherConn struct {
	net.Conn // the accepted connection

	// Set once.
	config *tls.Config

	begun bool // owned by the reader
	// tls is nil for a plain connection. Atomic: the first Read writes tls; before it returns, other
	// goroutines only call Close.
	tls atomic.Pointer[tls.Conn]
}

// handshake is the first byte of a TLS connection.
const handshake = 0x16

func (c *eitherConn) Read(b []byte) (int, error) {
	if !c.begun {
		if len(b) == 0 {
			return 0, nil
		}
		n, err := c.Conn.Read(b[:1])
		if n == 0 {
			return 0, err
		}
		c.begun = true
		if b[0] != handshake {
			return n, err
		}
		c.tls.Store(tls.Server(&ahead{Conn: c.Conn, first: []byte{b[0]}}, c.config))
	}
	if t := c.tls.Load(); t != nil {
		return t.Read(b)
	}
	return c.Conn.Read(b)
}

func (c *eitherConn) Write(b []byte) (int, error) {
	if t := c.tls.Load(); t != nil {
		return t.Write(b)
	}
	return c.Conn.Write(b)
}

func (c *eitherConn) Close() error {
	if t := c.tls.Load(); t != nil {
		return t.Close()
	}
	return c.Conn.Close()
}

// ahead is a connection whose first byte has been read.
type ahead struct {
	net.Conn
	first []byte // owned by the reader
}

func (a *ahead) Read(b []byte) (int, error) {
	if len(a.first) > 0 {
		n := copy(b, a.first)
		a.first = a.first[n:]
		return n, nil
	}
	return a.Conn.Read(b)
}

type eitherKey struct{}

// serveEither limits plain connections of srv, which serves an either, to metrics and health checks.
// port is the listener's port.
func serveEither(srv *http.Server, port int) *http.Server {
	srv.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		return context.WithValue(ctx, eitherKey{}, c)
	}
	all, refused := srv.Handler, httpapi.TLSRequired(port)
	srv.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if t := r.Context().Value(eitherKey{}).(*eitherConn).tls.Load(); t != nil {
			state := t.ConnectionState()
			r.TLS = &state
		} else if r.Method != http.MethodGet || r.URL.Path != "/metrics" && r.URL.Path != "/healthz" {
			refused.ServeHTTP(w, r)
			return
		}
		all.ServeHTTP(w, r)
	})
	return srv
}
