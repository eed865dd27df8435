package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/iotest"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/bounded"
	"github.com/srtm-io/srtm/internal/testkit"
)

// script is a connection that sends a prepared text.
type script struct {
	net.Conn
	io.Reader
}

func (s script) Read(p []byte) (int, error) { return s.Reader.Read(p) }

// last are header lines that end as a request line does.
var last = []string{"X: c HTTP/1.1", "X:c HTTP/1.1", "X: b\n\tc HTTP/1.1", "X: b\n c d HTTP/1.1", strings.Repeat("X", 600) + ":" + strings.Repeat("y", 2000) + " HTTP/1.1"}

// After any earlier bytes on a connection, however split, Twice reports every request with two
// framings that net/http reads. Of other requests, Twice reports only those whose line equals an
// earlier line of such a request.
func TestNetHTTPReadsNoneUnnoticed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var text strings.Builder
		var twice []bool
		head := func(i int) (string, bool) {
			switch form := rapid.IntRange(0, 4).Draw(t, "form"); form {
			case 0:
				body := rapid.SampledFrom([]string{"", "x", "x\n", "\n\n", "a: b", "x\r\n\r\nGET", "Content-Length: 1\r\n", strings.Repeat("y", 3*maxLine),
					"POST /9 HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"}).Draw(t, "body")
				return fmt.Sprintf("POST /%d HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s", i, len(body), body), false
			case 1:
				return fmt.Sprintf("POST /%d HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nxyz\r\n0\r\n\r\n", i), false
			case 2:
				return fmt.Sprintf("POST /%d HTTP/1.1\nHost: a\nX: b HTTP/1.1\ncontent-length:%s4\ntransfer-encoding: chunked\n%s\n\n0\r\n\r\n",
					i, strings.Repeat(" ", rapid.SampledFrom([]int{0, 1, 2 * maxLine}).Draw(t, "spaces")), rapid.SampledFrom(last).Draw(t, "last")), true
			case 3:
				return fmt.Sprintf("POST /%d?%s HTTP/1.1\r\nTransfer-Encoding: chunked\r\nHost: a\r\nContent-Length: 4\r\n\r\n0\r\n\r\n", i, strings.Repeat("z", 2*maxLine)), true
			default:
				return fmt.Sprintf("GET /%d HTTP/1.1\r\nHost: a\r\n\r\n", i), false
			}
		}
		for i := range rapid.IntRange(1, 3).Draw(t, "requests") {
			request, ambiguous := head(i)
			text.WriteString(request)
			twice = append(twice, ambiguous)
		}
		var from io.Reader = strings.NewReader(text.String())
		if rapid.Bool().Draw(t, "byte by byte") {
			from = iotest.OneByteReader(from)
		}
		c := &framedConn{Conn: &bounded.Conn{Conn: script{Reader: from}}}
		r := bufio.NewReader(c)
		for i, want := range twice {
			req, err := http.ReadRequest(r)
			if err != nil {
				t.Fatalf("request %d of %q: %v", i, text.String(), err)
			}
			if got := framedTwice(c, req); got != want {
				t.Fatalf("request %d of %q: %v, want %v", i, text.String(), got, want)
			}
			testkit.Result(io.Copy(io.Discard, req.Body)).Must(t)
		}
	})
}

// If more requests than the bound are remembered, every request that may have two framings counts as
// framed twice.
func TestWhatIsRememberedIsBounded(t *testing.T) {
	const head = "POST /%04d HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
	var text strings.Builder
	for i := range 1000 {
		fmt.Fprintf(&text, head, i)
	}
	text.WriteString("POST /other HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n")
	c := &framedConn{Conn: &bounded.Conn{Conn: script{Reader: strings.NewReader(text.String())}}}
	r := bufio.NewReader(c)
	for i := range 1002 {
		req := testkit.Result(http.ReadRequest(r)).Must(t)
		testkit.MustEqual(t, framedTwice(c, req), i < 1001, "request %d", i)
		testkit.Result(io.Copy(io.Discard, req.Body)).Must(t)
	}
	if known := c.twice.Load().(string); len(known) > 2*maxRequests {
		t.Errorf("%d bytes are remembered", len(known))
	}
}
