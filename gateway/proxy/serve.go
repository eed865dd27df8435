package proxy

import (
	"bytes"
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"sync"
	"syscall"

	"github.com/srtm-io/srtm/internal/connlimit"
	"github.com/srtm-io/srtm/internal/secure"
)

// Server returns the server of a Listener, for HTTP/1.1 and 2, the latter also in clear
// for clients that know that it is spoken. The timeouts of connections are those of the
// policy that there is now.
func (p *Proxy) Server(maxHeader int) *http.Server {
	protocols := &http.Protocols{}
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true)
	timeouts := p.rules.Load().policy.Timeouts
	return &http.Server{
		Handler: p, Protocols: protocols, MaxHeaderBytes: maxHeader, ErrorLog: slog.NewLogLogger(p.faults, slog.LevelDebug),
		ReadHeaderTimeout: timeouts.Header, IdleTimeout: timeouts.Idle,
		BaseContext: func(net.Listener) context.Context { return p.base },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, c)
		},
	}
}

// Listener returns ln with as many connections as there may be, with TLS where the guard
// has it, and otherwise with an eye on how requests are framed.
func (p *Proxy) Listener(ln net.Listener, guard *secure.Server) net.Listener {
	limited := &connlimit.Listener{Listener: ln, Slots: &p.slots}
	if secured := guard.Listener(limited); secured != net.Listener(limited) {
		return secured
	}
	limited.Plain = true
	return watchedListener{limited}
}

// A request that has both Content-Length and Transfer-Encoding, or the latter in
// HTTP/1.0, means one thing to net/http, which drops the first, and perhaps another to
// what stands in front of the gateway: what one takes for the body, the other takes for
// the next request, which may be another client's. net/http keeps no trace of it, so
// the heads are looked at as they are read.

type connKey struct{} // of a request's net.Conn

type watchedListener struct{ net.Listener }

func (l watchedListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &watchedConn{limitedConn: c.(limitedConn)}, nil
}

// limitedConn is what connlimit's connections are.
type limitedConn interface {
	net.Conn
	syscall.Conn
	CloseWrite() error
}

// watchedConn notes the first lines of heads that are framed twice. Every run of lines
// between two empty ones is taken for a head: where a body is taken for one, too, that
// matters only to a later request with the same first line.
type watchedConn struct {
	limitedConn

	// Owned by who reads: of this head.
	line, first    []byte
	length, coding bool

	mu struct {
		sync.Mutex
		ambiguous []string // first lines; with maxAmbiguous of them, any
	}
}

const (
	maxAmbiguous = 8
	maxFirstLine = 512 // bytes of a line that are kept
)

func (c *watchedConn) Read(p []byte) (int, error) {
	n, err := c.limitedConn.Read(p)
	for rest := p[:n]; len(rest) > 0; {
		part, after, whole := bytes.Cut(rest, []byte{'\n'})
		c.line = append(c.line, part[:min(len(part), maxFirstLine-len(c.line))]...)
		if whole {
			c.lineRead()
		}
		rest = after
	}
	return n, err
}

func (c *watchedConn) lineRead() {
	line := bytes.TrimSuffix(c.line, []byte{'\r'})
	name, _, _ := bytes.Cut(line, []byte{':'})
	switch {
	case len(line) == 0:
		if c.coding && (c.length || bytes.HasSuffix(c.first, []byte("HTTP/1.0"))) {
			c.mu.Lock()
			if len(c.mu.ambiguous) < maxAmbiguous {
				c.mu.ambiguous = append(c.mu.ambiguous, string(c.first))
			}
			c.mu.Unlock()
		}
		c.first, c.length, c.coding = c.first[:0], false, false
	case len(c.first) == 0:
		c.first = append(c.first, line...)
	case bytes.EqualFold(name, []byte("Content-Length")):
		c.length = true
	case bytes.EqualFold(name, []byte("Transfer-Encoding")):
		c.coding = true
	}
	c.line = c.line[:0]
}

// ambiguous reports whether a request was framed twice.
func ambiguous(r *http.Request) bool {
	if r.ProtoMajor != 1 || len(r.TransferEncoding) == 0 && r.ProtoMinor > 0 {
		return false
	}
	c, ok := r.Context().Value(connKey{}).(*watchedConn)
	if !ok {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	first := r.Method + " " + r.RequestURI + " " + r.Proto
	return len(c.mu.ambiguous) == maxAmbiguous || slices.Contains(c.mu.ambiguous, first[:min(len(first), maxFirstLine)])
}

// unread returns the connection of a request that net/http does not look after: in
// HTTP/1, while there may be more of a body to read. Otherwise it ends the request's
// context when the client has gone.
func unread(r *http.Request) syscall.Conn {
	if r.ProtoMajor != 1 || r.Body == nil || r.Body == http.NoBody {
		return nil
	}
	c := r.Context().Value(connKey{})
	if secured, ok := c.(*tls.Conn); ok {
		c = secured.NetConn()
	}
	raw, _ := c.(syscall.Conn)
	return raw
}
