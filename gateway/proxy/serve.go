package proxy

import (
	"bytes"
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/srtm-io/srtm/internal/connlimit"
	"github.com/srtm-io/srtm/internal/secure"
)

// Server returns the server of a Listener, for HTTP/1.1 and 2, the latter also in clear
// for clients that know that it is spoken. The timeouts of connections are those of the
// policy that there is now.
func (p *Proxy) Server(maxHeader int) *http.Server {
	timeouts := p.rules.Load().policy.Timeouts
	return &http.Server{
		Handler: p, Protocols: bothProtocols(), MaxHeaderBytes: maxHeader, ErrorLog: slog.NewLogLogger(p.faults, slog.LevelDebug),
		ReadHeaderTimeout: timeouts.Header, IdleTimeout: timeouts.Idle,
		BaseContext: func(net.Listener) context.Context { return p.base },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, c)
		},
	}
}

// bothProtocols are HTTP/1.1 and 2, the latter to servers with TLS only: in clear HTTP/1.1 comes first.
func bothProtocols() *http.Protocols {
	both := &http.Protocols{}
	both.SetHTTP1(true)
	both.SetHTTP2(true)
	both.SetUnencryptedHTTP2(true)
	return both
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
	return &watchedConn{Conn: c.(*connlimit.Conn)}, nil
}

// watchedConn notes the request lines of heads that are framed twice. What net/http takes
// for a head it cannot know: every run of lines between two empty ones may be one, and
// every line of it that ends as a request line does may end in one, since a body need not
// end with a line. Where a body is taken for a head, too, that matters only to a later
// request with the same request line.
type watchedConn struct {
	*connlimit.Conn

	// Owned by who reads: of this run of lines.
	line           []byte // without its middle, if it is longer than maxLine
	requests       []byte // lines that end as request lines do
	length, coding bool

	ambiguous atomic.Value // string: request lines; longer than maxRequests: any. Written by who reads
}

const (
	maxLine     = 1 << 10
	maxRequests = 4 << 10
)

func (c *watchedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	for rest := p[:n]; len(rest) > 0; {
		part, after, whole := bytes.Cut(rest, []byte{'\n'})
		c.line = append(c.line, part...)
		if over := len(c.line) - maxLine; over > 0 {
			c.line = slices.Delete(c.line, maxLine/2, maxLine/2+over)
		}
		if whole {
			c.lineRead(bytes.TrimSuffix(c.line, []byte{'\r'}))
			c.line = c.line[:0]
		}
		rest = after
	}
	return n, err
}

func (c *watchedConn) lineRead(line []byte) {
	name, _, _ := bytes.Cut(line, []byte{':'})
	c.length = c.length || bytes.EqualFold(name, []byte("Content-Length"))
	c.coding = c.coding || bytes.EqualFold(name, []byte("Transfer-Encoding"))
	if end := len(line) - len(" HTTP/1.1"); end >= 0 && bytes.HasPrefix(line[end:], []byte(" HTTP/1.")) && len(c.requests) <= maxRequests {
		c.requests = append(append(c.requests, line...), '\n')
	}
	if len(line) > 0 {
		return
	}
	known, _ := c.ambiguous.Load().(string)
	if c.coding && (c.length || bytes.Contains(c.requests, []byte(" HTTP/1.0\n"))) && len(known) <= maxRequests {
		c.ambiguous.Store(known + string(c.requests))
	}
	c.requests, c.length, c.coding = c.requests[:0], false, false
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
	known, _ := c.ambiguous.Load().(string)
	line := r.Method + " " + r.RequestURI + " " + r.Proto + "\n"
	return len(known) > maxRequests || strings.Contains(known, line[max(0, len(line)-maxLine/2):])
}

// hangs is a connection that knows whether its client has gone.
type hangs interface{ HungUp() bool }

// unread returns the connection of a request that net/http does not look after: in
// HTTP/1, while there may be more of a body to read. Otherwise it ends the request's
// context when the client has gone.
func unread(r *http.Request) hangs {
	if r.ProtoMajor != 1 || r.Body == nil || r.Body == http.NoBody {
		return nil
	}
	c := r.Context().Value(connKey{})
	if secured, ok := c.(*tls.Conn); ok {
		c = secured.NetConn()
	}
	client, _ := c.(hangs)
	return client
}
