// Package framing tells of requests that are framed twice. One that has both Content-Length
// and Transfer-Encoding, or the latter in HTTP/1.0, means one thing to net/http, which drops
// the first, and perhaps another to what stands in front of it: what one takes for the body,
// the other takes for the next request, which may be another client's. net/http keeps no
// trace of it, so connections look at what they read. What becomes of such a request is its
// handler's business. It knows HTTP/1 in clear: with TLS there is nothing to look at.
package framing

import (
	"bytes"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/srtm-io/srtm/internal/connlimit"
)

// Listener is one whose connections are Conns.
type Listener struct{ *connlimit.Listener }

// Accept returns the next connection.
func (l Listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &Conn{Conn: c.(*connlimit.Conn)}, nil
}

// Conn notes the request lines of heads that are framed twice. What net/http takes for a
// head it cannot know: every run of lines between two empty ones may be one, and every line
// of it that ends as a request line does may end in one, since a body need not end with a
// line. Where a body is taken for a head, too, that matters only to a later request with
// the same request line.
type Conn struct {
	*connlimit.Conn

	// Owned by who reads: of this run of lines.
	line           []byte // without its middle, if it is longer than maxLine
	requests       []byte // lines that end as request lines do
	length, coding bool

	twice atomic.Value // string: request lines; longer than maxRequests: any. Written by who reads
}

const (
	maxLine     = 1 << 10
	maxRequests = 4 << 10
)

// Read implements net.Conn.
func (c *Conn) Read(p []byte) (int, error) {
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

func (c *Conn) lineRead(line []byte) {
	if end := len(line) - len(" HTTP/1.1"); end > 0 && bytes.HasPrefix(line[end:], []byte(" HTTP/1.")) {
		method, _, _ := bytes.Cut(line, []byte{' '})
		if line[0] > ' ' && len(c.line) < maxLine && !bytes.Contains(method, []byte{':'}) {
			c.reset() // it is no header line, so what came before it was no head
		}
		if len(c.requests) <= maxRequests {
			c.requests = append(append(c.requests, line...), '\n')
		}
	}
	name, _, _ := bytes.Cut(line, []byte{':'})
	c.length = c.length || bytes.EqualFold(name, []byte("Content-Length"))
	c.coding = c.coding || bytes.EqualFold(name, []byte("Transfer-Encoding"))
	if len(line) > 0 {
		return
	}
	known, _ := c.twice.Load().(string)
	if c.coding && (c.length || bytes.Contains(c.requests, []byte(" HTTP/1.0\n"))) && len(known) <= maxRequests {
		c.twice.Store(known + string(c.requests))
	}
	c.reset()
}

func (c *Conn) reset() { c.requests, c.length, c.coding = c.requests[:0], false, false }

// Twice reports whether a request that came over a connection was framed twice; false where
// the connection is no Conn.
func Twice(over net.Conn, r *http.Request) bool {
	c, ok := over.(*Conn)
	if !ok || r.ProtoMajor != 1 || len(r.TransferEncoding) == 0 && r.ProtoMinor > 0 {
		return false
	}
	known, _ := c.twice.Load().(string)
	line := r.Method + " " + r.RequestURI + " " + r.Proto + "\n"
	return len(known) > maxRequests || strings.Contains(known, line[max(0, len(line)-maxLine/2):])
}
