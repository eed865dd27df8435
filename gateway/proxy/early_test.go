package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// rawServer lets a test answer each connection, until the test ends.
func rawServer(t testing.TB, serve func(c net.Conn, r *bufio.Reader)) string {
	t.Helper()
	ln := testkit.Listen(t)
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				serve(c, bufio.NewReader(c))
			}()
		}
	}()
	return "http://" + ln.Addr().String()
}

// readHead returns the lines of a request's head, "" once the connection has ended.
func readHead(r *bufio.Reader) string {
	var head strings.Builder
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			return ""
		}
		head.WriteString(line)
		if line == "\r\n" {
			return head.String()
		}
	}
}

const slowest = "[timeouts]\nbody = \"1h\"\nresponse = \"1h\"\n"

// A server may answer before the end of the body. The gateway lets neither the server nor the client
// wait: no timeout can end these requests.
func TestAnswerBeforeTheEndOfTheBodyIsRelayedAtOnce(t *testing.T) {
	done := make(chan struct{})
	defer close(done)
	url := rawServer(t, func(c net.Conn, r *bufio.Reader) {
		for readHead(r) != "" {
			_, _ = io.WriteString(c, "HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
			<-done
		}
	})
	g := serve(t, slowest+"[[server]]\nurl = \""+url+"\"", nil)
	for name, request := range map[string]string{
		"nothing of it":   "Content-Length: 100000\r\n\r\n",
		"a part of it":    "Content-Length: 10000000\r\n\r\n" + strings.Repeat("x", 100000),
		"chunks":          "Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n",
		"asks first":      "Expect: 100-continue\r\nContent-Length: 5\r\n\r\n",
		"closes anyway":   "Connection: close\r\nContent-Length: 100000\r\n\r\n",
		"declares little": "Content-Length: 10\r\n\r\nabc",
	} {
		t.Run(name, func(t *testing.T) {
			c, r := g.dial(t)
			write(t, c, "POST / HTTP/1.1\r\nHost: a\r\n"+request)
			res, body := answer(t, r)
			if res.StatusCode != http.StatusRequestEntityTooLarge || body != "no" || !res.Close {
				t.Errorf("%s, %q, closes %v", res.Status, body, res.Close)
			}
			if _, err := io.Copy(io.Discard, r); err != nil && !strings.Contains(err.Error(), "reset") {
				t.Error("the connection does not end", err)
			}
		})
	}
	g.idle(t)
}

// The same for an HTTP/2 server, whatever the client speaks.
func TestAnswerOfHTTP2BeforeTheEndOfTheBodyIsRelayedAtOnce(t *testing.T) {
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusRequestEntityTooLarge)
		_, _ = io.WriteString(w, "no")
	}))
	s.Config.Protocols = &http.Protocols{}
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	t.Cleanup(s.Close)
	g := serve(t, slowest+"[[server]]\nurl = \"h2c"+strings.TrimPrefix(s.URL, "http")+"\"", nil)
	for name, expect := range map[string]string{"sends": "", "asks first": "100-continue"} {
		t.Run("HTTP/1.1 "+name, func(t *testing.T) {
			c, r := g.dial(t)
			write(t, c, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n")
			if expect != "" {
				write(t, c, "Expect: "+expect+"\r\n")
			}
			write(t, c, "\r\n")
			if res, body := answer(t, r); res.StatusCode != http.StatusRequestEntityTooLarge || body != "no" || !res.Close {
				t.Errorf("%s, %q, closes %v", res.Status, body, res.Close)
			}
		})
		t.Run("HTTP/2 "+name, func(t *testing.T) {
			protocols := &http.Protocols{}
			protocols.SetUnencryptedHTTP2(true)
			transport := &http.Transport{Protocols: protocols}
			defer transport.CloseIdleConnections()
			body, end := io.Pipe()
			defer end.Close()
			request := testkit.Result(http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+g.at, body)).Must(t)
			if expect != "" {
				request.Header.Set("Expect", expect)
			}
			res := testkit.Result(transport.RoundTrip(request)).Must(t)
			if text, err := io.ReadAll(res.Body); res.StatusCode != http.StatusRequestEntityTooLarge || string(text) != "no" || err != nil {
				t.Errorf("%s, %q, %v", res.Status, text, err)
			}
		})
	}
	g.idle(t)
	if s := g.Status().Servers[0]; s.Aborted != 0 || s.Failed != 0 {
		t.Errorf("%+v", s)
	}
}

// A server that never sends 100 Continue, as an HTTP/1.0 server, gets the body after a while.
func TestBodyWithoutContinue(t *testing.T) {
	url := rawServer(t, func(c net.Conn, r *bufio.Reader) {
		body := make([]byte, 5)
		if readHead(r) == "" {
			return
		}
		if _, err := io.ReadFull(r, body); err == nil {
			_, _ = fmt.Fprintf(c, "HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\n%s", body)
		}
	})
	g := serve(t, slowest+"[[server]]\nurl = \""+url+"\"", nil)
	c, r := g.dial(t)
	write(t, c, "POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n")
	if res, _ := answer(t, r); res.StatusCode != http.StatusContinue {
		t.Fatal(res.Status)
	}
	write(t, c, "hello")
	if res, body := answer(t, r); res.StatusCode != http.StatusOK || body != "hello" {
		t.Errorf("%s, %q", res.Status, body)
	}
}

// If the gateway itself refuses a request, the refusal does not wait for the body either. A small body
// that has arrived does not end the connection.
func TestRefusalDoesNotWaitForTheBody(t *testing.T) {
	g := serve(t, slowest+"[[server]]\nurl = \"http://127.0.0.1:1\"", func(c *Config) { c.MaxBody = 1 << 20 })
	c, r := g.dial(t)
	write(t, c, "POST /a/..;/b HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello")
	if res, _ := answer(t, r); res.StatusCode != http.StatusBadRequest || res.Close {
		t.Errorf("a small body: %s, closes %v", res.Status, res.Close)
	}
	write(t, c, "POST /a/..;/b HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n")
	if res, _ := answer(t, r); res.StatusCode != http.StatusBadRequest || !res.Close {
		t.Errorf("a body that does not come: %s, closes %v", res.Status, res.Close)
	}
}

// The gateway relays the part of an answer that a server has sent, without waiting for the rest. The
// answer has a known length.
func TestAnswerIsRelayedAsItComes(t *testing.T) {
	more := make(chan struct{})
	url := rawServer(t, func(c net.Conn, r *bufio.Reader) {
		readHead(r)
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nab")
		<-more
		_, _ = io.WriteString(c, "cd")
	})
	g := serve(t, slowest+"[[server]]\nurl = \""+url+"\"", nil)
	c, r := g.dial(t)
	write(t, c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
	res := testkit.Result(http.ReadResponse(r, nil)).Must(t)
	half := make([]byte, 2)
	testkit.Result(io.ReadFull(res.Body, half)).Must(t)
	close(more)
	rest := testkit.Result(io.ReadAll(res.Body)).Must(t)
	testkit.Equal(t, string(half)+string(rest), "abcd", "body")
}

// Both sides may stream at the same time.
func TestServerAnswersWhileItReads(t *testing.T) {
	url := backend(t, func(w http.ResponseWriter, r *http.Request) {
		control := http.NewResponseController(w)
		testkit.NoError(t, control.EnableFullDuplex())
		testkit.NoError(t, control.Flush())
		lines := bufio.NewReader(r.Body)
		for {
			line, err := lines.ReadString('\n')
			if err != nil {
				return
			}
			_, _ = io.WriteString(w, "heard "+line)
			testkit.NoError(t, control.Flush())
		}
	})
	g := serve(t, slowest+"[[server]]\nurl = \""+url+"\"", nil)
	c, r := g.dial(t)
	write(t, c, "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
	res := testkit.Result(http.ReadResponse(r, nil)).Must(t)
	lines := bufio.NewReader(res.Body)
	for i := range 3 {
		write(t, c, fmt.Sprintf("2\r\n%d\n\r\n", i))
		testkit.Equal(t, testkit.Result(lines.ReadString('\n')).Must(t), fmt.Sprintf("heard %d\n", i), "while the body continues")
	}
	write(t, c, "0\r\n\r\n")
	if rest, err := io.ReadAll(lines); err != nil || len(rest) > 0 {
		t.Errorf("%q, %v", rest, err)
	}
	g.idle(t)
}

// A server that answers and closes with part of the body unread resets the connection.
func TestAnswerOfAServerThatClosesInTheMiddleOfTheBody(t *testing.T) {
	long := strings.Repeat("n", 60000)
	url := rawServer(t, func(c net.Conn, r *bufio.Reader) {
		if readHead(r) != "" {
			_, _ = fmt.Fprintf(c, "HTTP/1.1 401 Unauthorized\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", len(long), long)
		}
	})
	g := serve(t, slowest+"[[server]]\nurl = \""+url+"\"", nil)
	for i := range 30 {
		c, r := g.dial(t)
		write(t, c, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 400000\r\n\r\n")
		go func() { _, _ = io.WriteString(c, strings.Repeat("x", 400000)) }()
		res, body := answer(t, r)
		if res.StatusCode != http.StatusUnauthorized || body != long {
			t.Fatalf("request %d: %s, %d bytes", i, res.Status, len(body))
		}
		c.Close()
	}
}

// The gateway does not invent headers that a server leaves out, and passes paths byte for byte.
func TestBytesThatPassUnchanged(t *testing.T) {
	heads := make(chan string, 1)
	url := rawServer(t, func(c net.Conn, r *bufio.Reader) {
		for {
			head := readHead(r)
			if head == "" {
				return
			}
			heads <- head
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nX-Empty:\r\nContent-Length: 6\r\n\r\n<html>")
		}
	})
	for _, base := range []string{"", "/app%2Fx"} {
		g := serve(t, "[[server]]\nurl = \""+url+base+"\"", nil)
		for _, path := range []string{"/", "/q/%2F/x", "/q/%2F/x|y", `/q/%2F/"x"`, "/q/%2F/{x}", "/q/%2F/\xc3\xa9", "/q/a%3Bb|c", "/a|b", "/a^b`", "/%e4%E4", "/a//b|", "//a/b|c", "//a/b", "/x?", "/x?a=%zz&b;c=|", "/%7Euser", "/a%2fb", "/\xff", "/a+b%20c"} {
			res, _ := g.get(t, path, "X-None:")
			head := <-heads
			target := strings.Split(head, " ")[1]
			if rest, absolute := strings.CutPrefix(target, url); absolute { // which every server understands
				target = rest
			}
			testkit.Equal(t, target, base+path, "path")
			if _, given := res.Header["Content-Type"]; given || len(res.Header["X-Empty"]) != 1 || !strings.Contains(head, "\r\nX-None: \r\n") {
				t.Errorf("%v, for %q", res.Header, head)
			}
		}
	}
}
