package main

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"sync/atomic"

	"github.com/srtm-io/srtm/nsqd/httpapi"
)

// mixedListener is a listener for TLS and for plain connections. The first byte of a connection
// decides.
type mixedListener struct {
	net.Listener
	config *tls.Config
}

func (l mixedListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &mixedConn{Conn: c, config: l.config}, nil
}

type mixedConn struct {
	net.Conn // the accepted connection

	// Set once.
	config *tls.Config

	started bool // owned by the reader
	// tls is nil for a plain connection. Atomic: the first Read writes tls; before it returns, other
	// goroutines only call Close.
	tls atomic.Pointer[tls.Conn]
}

// handshake is the first byte of a TLS connection.
const handshake = 0x16

func (c *mixedConn) Read(b []byte) (int, error) {
	if !c.started {
		if len(b) == 0 {
			return 0, nil
		}
		n, err := c.Conn.Read(b[:1])
		if n == 0 {
			return 0, err
		}
		c.started = true
		if b[0] != handshake {
			return n, err
		}
		c.tls.Store(tls.Server(&prefixedConn{Conn: c.Conn, first: []byte{b[0]}}, c.config))
	}
	if t := c.tls.Load(); t != nil {
		return t.Read(b)
	}
	return c.Conn.Read(b)
}

func (c *mixedConn) Write(b []byte) (int, error) {
	if t := c.tls.Load(); t != nil {
		return t.Write(b)
	}
	return c.Conn.Write(b)
}

func (c *mixedConn) Close() error {
	if t := c.tls.Load(); t != nil {
		return t.Close()
	}
	return c.Conn.Close()
}

// prefixedConn is a connection whose first byte has been read.
type prefixedConn struct {
	net.Conn
	first []byte // owned by the reader
}

// NetConn returns the accepted connection.
func (a *prefixedConn) NetConn() net.Conn { return a.Conn }

func (a *prefixedConn) Read(b []byte) (int, error) {
	if len(a.first) > 0 {
		n := copy(b, a.first)
		a.first = a.first[n:]
		return n, nil
	}
	return a.Conn.Read(b)
}

type mixedKey struct{}

// serveMixed limits plain connections of srv, which serves a mixedListener, to metrics and health
// checks. port is the listener's port.
func serveMixed(srv *http.Server, port int) *http.Server {
	srv.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		return context.WithValue(ctx, mixedKey{}, c)
	}
	all, refused := srv.Handler, httpapi.TLSRequired(port)
	srv.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if t := r.Context().Value(mixedKey{}).(*mixedConn).tls.Load(); t != nil {
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
