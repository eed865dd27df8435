package proxy

import (
	"bytes"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/srtm-io/srtm/internal/bounded"
)

// framedListener is a listener whose connections are Conns.
type framedListener struct{ *bounded.Listener }

// Accept returns the next connection.
func (l framedListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &framedConn{Conn: c.(*bounded.Conn)}, nil
}

// framedConn detects requests that are framed twice: with both Content-Length and
// Transfer-Encoding, or with Transfer-Encoding in HTTP/1.0. net/http drops
// Content-Length, but a proxy in front may use it. Then the body for one side is the next
// request for the other side, perhaps another client's. net/http leaves no trace of the
// double framing, so connections examine what they read. The handler decides about such a
// request. framedConn understands only HTTP/1 without TLS.
//
// framedConn records the request lines of heads that are framed twice. Conn cannot know which
// bytes net/http takes for a head. Every run of lines between two empty lines may be a
// head. Every line of the run that ends like a request line may end in a request line,
// because a body need not end with a line break. If Conn takes a body for a head, only a
// later request with the same request line is affected.
type framedConn struct {
	*bounded.Conn

	// Owned by the reader; of the current run of lines.
	line           []byte // without its middle, if longer than maxLine
	requests       []byte // lines that end like request lines
	length, coding bool

	twice atomic.Value // string: request lines; longer than maxRequests: any. Written by the reader
}

const (
	maxLine     = 1 << 10
	maxRequests = 4 << 10
)

// Read implements net.Conn.
func (c *framedConn) Read(p []byte) (int, error) {
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

func (c *framedConn) lineRead(line []byte) {
	if end := len(line) - len(" HTTP/1.1"); end > 0 && bytes.HasPrefix(line[end:], []byte(" HTTP/1.")) {
		method, _, _ := bytes.Cut(line, []byte{' '})
		if line[0] > ' ' && len(c.line) < maxLine && !bytes.Contains(method, []byte{':'}) {
			c.reset() // not a header line, so the lines before were no head
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

func (c *framedConn) reset() { c.requests, c.length, c.coding = c.requests[:0], false, false }

// framedTwice reports whether a request over the connection was framed twice; false for a
// connection that is not a Conn.
func framedTwice(over net.Conn, r *http.Request) bool {
	c, ok := over.(*framedConn)
	if !ok || r.ProtoMajor != 1 || len(r.TransferEncoding) == 0 && r.ProtoMinor > 0 {
		return false
	}
	known, _ := c.twice.Load().(string)
	line := r.Method + " " + r.RequestURI + " " + r.Proto + "\n"
	return len(known) > maxRequests || strings.Contains(known, line[max(0, len(line)-maxLine/2):])
}
