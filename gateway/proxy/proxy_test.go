package proxy

import (
	"bufio"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/gateway/policy"
	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// gateway is a running Proxy.
type gateway struct {
	*Proxy
	at   string // host:port
	stop func()
}

// serve runs a Proxy with a policy until the test ends. change may be nil.
func serve(t testing.TB, text string, change func(*Config)) *gateway {
	t.Helper()
	return serveSecured(t, text, change, secure.ServerConfig{})
}

func serveSecured(t testing.TB, text string, change func(*Config), security secure.ServerConfig) *gateway {
	t.Helper()
	cfg := Config{Policy: parse(t, text), Scheduler: "mqos", Gateways: 1, Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry()}
	if change != nil {
		change(&cfg)
	}
	p := testkit.Result(New(cfg)).Must(t)
	guard := testkit.Result(security.Load()).Must(t)
	ln := testkit.Listen(t)
	var group lifecycle.Group
	group.Add("proxy", p.Run)
	group.Add("http", lifecycle.ServeWithin(p.Listener(ln, guard), p.Server(64<<10), func() time.Duration { return testkit.Hang }))
	return &gateway{p, ln.Addr().String(), testkit.Run(t, group.Run)}
}

func parse(t testing.TB, text string) *policy.Policy {
	t.Helper()
	return testkit.Result(policy.Parse([]byte(text))).Must(t)
}

// backend serves until the test ends.
func backend(t testing.TB, h http.HandlerFunc) string {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s.URL
}

// one is a policy of one server. The server takes one request at a time.
func one(url string, more ...string) string {
	return strings.Join(more, "\n") + fmt.Sprintf("\n[[server]]\nurl = %q\ncpu = 1\n[[cost]]\npath = \"/\"\ncpu = 100\n", url)
}

// dial opens a connection to the gateway for raw writes.
func (g *gateway) dial(t testing.TB) (net.Conn, *bufio.Reader) {
	t.Helper()
	c := testkit.Result(net.Dial("tcp", g.at)).Must(t)
	t.Cleanup(func() { _ = c.Close() }) // closed already, in some tests
	return c, bufio.NewReader(c)
}

func write(t testing.TB, c net.Conn, text string) {
	t.Helper()
	testkit.Result(io.WriteString(c, text)).Must(t)
}

// answer reads an answer and its body.
func answer(t testing.TB, r *bufio.Reader) (*http.Response, string) {
	t.Helper()
	t.Helper()
	res := testkit.Result(http.ReadResponse(r, nil)).Must(t)
	body, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err, res, string(body))
	}
	return res, string(body)
}

// get sends a request on a separate connection.
func (g *gateway) get(t testing.TB, path string, header ...string) (*http.Response, string) {
	t.Helper()
	c, r := g.dial(t)
	defer c.Close()
	write(t, c, "GET "+path+" HTTP/1.1\r\nHost: shop.example\r\n"+strings.Join(append(header, ""), "\r\n")+"\r\n")
	return answer(t, r)
}

// idle fails unless all capacity comes back, and no request counts as in progress.
func (g *gateway) idle(t testing.TB) {
	t.Helper()
	testkit.WaitFor(t, "all capacity is free", func() bool {
		s := g.Status()
		for _, v := range s.Servers {
			for name := range v.Free {
				if v.Free[name] != v.Capacity[name] {
					return false
				}
			}
			if v.InFlight != 0 {
				return false
			}
		}
		for _, c := range s.Classes {
			if c.Queued != 0 || c.InFlight != 0 {
				return false
			}
		}
		return true
	})
	g.dispatcher.mu.Lock()
	defer g.dispatcher.mu.Unlock()
	if g.dispatcher.mu.tickets.Front() != nil {
		t.Error("a ticket is left")
	}
}

// A client that disconnects at any moment is charged once for what its request used.
func TestAbortedRequestIsChargedOnce(t *testing.T) {
	arrived, release := make(chan string, 10), make(chan struct{})
	url := backend(t, func(w http.ResponseWriter, r *http.Request) {
		arrived <- r.URL.Path
		switch r.URL.Path {
		case "/hold":
			select {
			case <-release:
			case <-r.Context().Done():
			}
		case "/upload":
			_, _ = io.Copy(io.Discard, r.Body)
		case "/download":
			block := make([]byte, 64<<10)
			for r.Context().Err() == nil {
				if _, err := w.Write(block); err != nil {
					return
				}
			}
		}
	})
	g := serve(t, one(url, "[[class]]\nname = \"c\"\nwait = \"10m\""), nil)
	server := func() ServerStatus { return g.Status().Servers[0] }
	t.Run("queued", func(t *testing.T) {
		first, _ := g.dial(t)
		write(t, first, "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n")
		<-arrived
		second, r := g.dial(t)
		write(t, second, "GET /x HTTP/1.1\r\nHost: a\r\n\r\n")
		testkit.WaitFor(t, "the second waits", func() bool { return g.Status().Classes[0].Queued == 1 })
		testkit.Must(t, second.(*net.TCPConn).CloseWrite())
		if _, err := r.Peek(1); err != io.EOF {
			t.Errorf("a client that ended its own side reads no error: %v", err)
		}
		testkit.WaitFor(t, "the second has left", func() bool { return g.Status().Classes[0].Left == 1 })
		// net/http does not watch a connection while the connection has unread body.
		third, _ := g.dial(t)
		write(t, third, "POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\nhalf")
		fourth, _ := g.dial(t)
		write(t, fourth, "POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nfull")
		testkit.WaitFor(t, "both wait", func() bool { return g.Status().Classes[0].Queued == 2 })
		third.Close()
		fourth.Close()
		testkit.WaitFor(t, "both have left", func() bool { return g.Status().Classes[0].Left == 3 })
		// Nor does net/http watch the connection once the next request has begun.
		fifth, _ := g.dial(t)
		write(t, fifth, "GET /x HTTP/1.1\r\nHost: a\r\n\r\n")
		testkit.WaitFor(t, "it waits", func() bool { return g.Status().Classes[0].Queued == 1 })
		write(t, fifth, "G")
		fifth.Close()
		testkit.WaitFor(t, "it has left", func() bool { return g.Status().Classes[0].Left == 4 })
		first.Close()
		g.idle(t)
		if s := server(); s.Sent != 1 || s.Aborted != 1 || s.Failed != 0 {
			t.Errorf("%+v", s)
		}
	})
	for i, c := range []struct{ name, request string }{
		{"dispatched", "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n"},
		{"in the middle of its body", "POST /upload HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\nhalf"},
		{"in the middle of its chunked body", "POST /upload HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"},
		{"in the middle of the answer", "GET /download HTTP/1.1\r\nHost: a\r\n\r\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			conn, r := g.dial(t)
			write(t, conn, c.request)
			<-arrived
			if strings.Contains(c.request, "/download") {
				testkit.Result(r.Peek(1000)).Must(t)
			}
			conn.Close()
			g.idle(t)
			if s := server(); s.Aborted != uint64(i+2) || s.Failed != 0 || s.Departed != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
	close(release)
	if res, _ := g.get(t, "/hold"); res.StatusCode != http.StatusOK {
		t.Error(res.Status)
	}
	g.idle(t)
	if s := server(); s.Departed != 1 || s.Sent != 6 {
		t.Errorf("%+v", s)
	}
}

// The gateway drops what clients claim about themselves in headers, unless the peer is trusted.
func TestClientHeadersAreDroppedUnlessTrusted(t *testing.T) {
	var got http.Header
	var host string
	url := backend(t, func(w http.ResponseWriter, r *http.Request) {
		got, host = r.Header, r.Host
		w.Header().Set("Srtm-Class", "forged")
		w.Header().Set("X-Own", "1")
		w.Header().Set("Connection", "X-Hop")
		w.Header().Set("X-Hop", "1")
	})
	forged := []string{"X-Forwarded-For: 192.0.2.1", "X-Forwarded-Host: forged", "X-Forwarded-Proto: gopher", "X-Forwarded-Port: 1", "Forwarded: for=192.0.2.1",
		"X-Real-Ip: 192.0.2.1", "Srtm-Class: forged", "Connection: X-Mine", "X-Mine: 1", "X-Kept: 1"}
	g := serve(t, one(url), nil)
	res, _ := g.get(t, "/a%2Fb?x=1;y", forged...)
	if res.Header["Srtm-Class"][0] != policy.Default || len(res.Header["Srtm-Class"]) != 1 || res.Header.Get("X-Own") != "1" || res.Header.Get("X-Hop") != "" || !strings.HasPrefix(res.Header.Get("Server-Timing"), "queue;dur=") {
		t.Errorf("%v", res.Header)
	}
	for name, want := range map[string]string{
		"X-Forwarded-For": "127.0.0.1", "X-Forwarded-Host": "shop.example", "X-Forwarded-Proto": "http", "X-Forwarded-Port": "", "Forwarded": "",
		"X-Real-Ip": "", "Srtm-Class": policy.Default, "X-Mine": "", "X-Kept": "1",
	} {
		testkit.Equal(t, strings.Join(got[name], ", "), want, "%s", name)
	}
	testkit.Equal(t, host, "shop.example", "Host")
	g = serve(t, one(url, `trusted_peers = ["127.0.0.0/8"]`), nil)
	g.get(t, "/", forged...)
	for name, want := range map[string]string{
		"X-Forwarded-For": "192.0.2.1, 127.0.0.1", "X-Forwarded-Host": "forged", "X-Forwarded-Proto": "gopher", "X-Forwarded-Port": "1", "Forwarded": "for=192.0.2.1",
		"X-Real-Ip": "192.0.2.1", "Srtm-Class": policy.Default,
	} {
		testkit.Equal(t, strings.Join(got[name], ", "), want, "trusted: %s", name)
	}
}

// The gateway passes protocol features beyond plain requests and answers.
func TestProtocol(t *testing.T) {
	next := make(chan struct{})
	url := backend(t, func(w http.ResponseWriter, r *http.Request) {
		control := http.NewResponseController(w)
		switch r.URL.Path {
		case "/trailer":
			body, _ := io.ReadAll(r.Body)
			w.Header().Set("Trailer", "X-Announced")
			fmt.Fprintf(w, "%s %s", body, r.Trailer.Get("X-Up"))
			w.Header().Set("X-Announced", "a")
			w.Header().Set(http.TrailerPrefix+"X-Sudden", "s")
		case "/trailers":
			announced := fmt.Sprint(r.Trailer)
			_, _ = io.Copy(io.Discard, r.Body)
			fmt.Fprint(w, announced, " ", r.Trailer)
		case "/continue":
			body, _ := io.ReadAll(r.Body)
			fmt.Fprintf(w, "%s", body)
		case "/hints":
			w.Header().Set("Link", "</a.css>; rel=preload")
			w.WriteHeader(http.StatusEarlyHints)
			fmt.Fprint(w, "done")
		case "/events":
			w.Header().Set("Content-Type", "text/event-stream")
			for range 3 {
				fmt.Fprint(w, "data: x\n\n")
				testkit.NoError(t, control.Flush())
				<-next
			}
		case "/socket":
			c, rw, err := control.Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			fmt.Fprint(rw, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
			for rw.Flush() == nil {
				line, err := rw.ReadString('\n')
				if err != nil {
					return
				}
				fmt.Fprint(rw, "echo "+line)
			}
		}
	})
	g := serve(t, one(url), nil)
	t.Run("trailers", func(t *testing.T) {
		c, r := g.dial(t)
		write(t, c, "POST /trailer HTTP/1.1\r\nHost: a\r\nTE: trailers\r\nTransfer-Encoding: chunked\r\nTrailer: X-Up\r\n\r\n2\r\nhi\r\n0\r\nX-Up: u\r\n\r\n")
		res, body := answer(t, r)
		if body != "hi u" || res.Trailer.Get("X-Announced") != "a" || res.Trailer.Get("X-Sudden") != "s" {
			t.Errorf("%q, %v", body, res.Trailer)
		}
	})
	t.Run("forged trailers", func(t *testing.T) {
		for _, peers := range []string{"", `trusted_peers = ["127.0.0.0/8"]`} { // peers that may pass on claims of their clients
			g := serve(t, one(url, peers), nil)
			for _, announced := range []string{"X-Up", "X-Up, X-Forwarded-For, X_Real.IP, SRTM-Class, Forwarded, Authorization, Host"} {
				c, r := g.dial(t)
				write(t, c, "POST /trailers HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTrailer: "+announced+"\r\n\r\n2\r\nhi\r\n0\r\nX-Up: u\r\nX-Forwarded-For: 192.0.2.1\r\n"+
					"x-forwarded-tls-client-cert: x\r\nX_Real.IP: 192.0.2.1\r\nSRTM-Class: paid\r\nForwarded: for=192.0.2.1\r\nAuthorization: Bearer x\r\nHost: b\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n")
				if _, body := answer(t, r); body != "map[X-Up:[]] map[X-Up:[u]]" {
					t.Errorf("%q, announced %q: %s", peers, announced, body)
				}
			}
		}
	})
	t.Run("100-continue", func(t *testing.T) {
		c, r := g.dial(t)
		write(t, c, "POST /continue HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
		if line, err := r.ReadString('\n'); err != nil || !strings.HasPrefix(line, "HTTP/1.1 100") {
			t.Fatalf("%q, %v", line, err)
		}
		testkit.Result(r.ReadString('\n')).Must(t)
		write(t, c, "hi")
		res, body := answer(t, r) // the server's own 100 was the only 100
		if body != "hi" || res.Header.Get("Srtm-Class") == "" {
			t.Errorf("%v, %q", res, body)
		}
	})
	t.Run("early hints", func(t *testing.T) {
		c, r := g.dial(t)
		write(t, c, "GET /hints HTTP/1.1\r\nHost: a\r\n\r\n")
		if res, err := http.ReadResponse(r, nil); err != nil || res.StatusCode != http.StatusEarlyHints || res.Header.Get("Link") == "" {
			t.Fatalf("%v, %v", res, err)
		}
		if res, body := answer(t, r); body != "done" || res.Header.Get("Srtm-Class") == "" || res.Header.Get("Server-Timing") == "" {
			t.Errorf("%v, %q", res, body)
		}
	})
	t.Run("a stream is passed on as it comes", func(t *testing.T) {
		c, r := g.dial(t)
		write(t, c, "GET /events HTTP/1.1\r\nHost: a\r\n\r\n")
		res, err := http.ReadResponse(r, nil)
		testkit.Must(t, err)
		events := bufio.NewReader(res.Body)
		for range 3 {
			testkit.Result(events.ReadString('\n')).MustEqual(t, "data: x\n")
			testkit.Result(events.ReadString('\n')).Must(t)
			next <- struct{}{}
		}
		if rest, err := io.ReadAll(events); err != nil || len(rest) > 0 {
			t.Errorf("%q, %v", rest, err)
		}
	})
	g.idle(t)
	t.Run("a websocket takes no capacity while it is open", func(t *testing.T) {
		c, r := g.dial(t)
		write(t, c, "GET /socket HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		if res, err := http.ReadResponse(r, nil); err != nil || res.StatusCode != http.StatusSwitchingProtocols {
			t.Fatalf("%v, %v", res, err)
		}
		for range 2 {
			write(t, c, "hello\n")
			testkit.Result(r.ReadString('\n')).MustEqual(t, "echo hello\n")
			g.idle(t)
		}
		c.Close()
		g.tunnels.Wait()
	})
	for range 3 { // pooled objects are as good as new
		if res, body := g.get(t, "/continue"); res.StatusCode != http.StatusOK || body != "" {
			t.Errorf("%v, %q", res.Status, body)
		}
	}
	if s := g.Status().Servers[0]; s.Failed != 0 || s.Aborted != 0 || s.Departed != 8 {
		t.Errorf("%+v", s)
	}
}

// The gateway leaves the query to the server, even a query that Go would not parse.
func TestQueriesPassAsTheyCame(t *testing.T) {
	url := backend(t, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.RequestURI) })
	for _, at := range []string{url, url + "/app"} {
		g := serve(t, one(at), nil)
		for _, query := range []string{"a=1;b=2", "a=50%&b=%zz", "a;b", "a=%2f+%20&&=", ""} {
			_, got := g.get(t, "/x?"+query)
			testkit.Equal(t, got, strings.TrimPrefix(at, url)+"/x?"+query, "what the server received")
		}
	}
}

// Malformed answers, and answers that exceed their declared length, do not reach the client.
func TestMalformedAnswersDoNotReachTheClient(t *testing.T) {
	url := backend(t, func(w http.ResponseWriter, r *http.Request) {
		c, rw, err := http.NewResponseController(w).Hijack()
		testkit.NoError(t, err)
		defer c.Close()
		text := "HTTP/1.1 " + strings.TrimPrefix(r.URL.Path, "/") + " Odd\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nSrtm-Class: forged\r\nX-Sum: 1\r\n\r\n"
		testkit.Result(rw.WriteString(text)).Must(t)
		testkit.NoError(t, rw.Flush())
	})
	g := serve(t, one(url), nil)
	for path, want := range map[string]int{"/000": http.StatusBadGateway, "/099": http.StatusBadGateway, "/200": http.StatusOK, "/299": 299} {
		res, body := g.get(t, path)
		if res.StatusCode != want || want < 300 && (body != "ok" || res.Trailer.Get("Srtm-Class") != "" || res.Trailer.Get("X-Sum") != "1") {
			t.Errorf("%s: %s, %q, %v", path, res.Status, body, res.Trailer)
		}
	}
	g.idle(t)
	if s := g.Status().Servers[0]; s.Failed != 2 || s.Departed != 2 {
		t.Errorf("%+v", s)
	}
}

// A request without a place in the queue, or out of time, is refused with a time to retry.
func TestQueueBounds(t *testing.T) {
	arrived, release := make(chan struct{}, 10), make(chan struct{})
	url := backend(t, func(_ http.ResponseWriter, r *http.Request) {
		arrived <- struct{}{}
		select {
		case <-release:
		case <-r.Context().Done():
		}
	})
	refused := func(t *testing.T, g *gateway, header ...string) {
		t.Helper()
		if res, body := g.get(t, "/", header...); res.StatusCode != http.StatusServiceUnavailable || res.Header.Get("Retry-After") == "" || res.Header.Get("Srtm-Class") != "c" || body == "" {
			t.Errorf("%s, %v, %q", res.Status, res.Header, body)
		}
	}
	var many strings.Builder // the headers take 1 MB, 60 KB each
	for i := range 9000 {
		fmt.Fprintf(&many, "%x:\r\n", i)
	}
	for _, c := range []struct {
		name, bound string
		waiting     int
		header      string
	}{{"count", `queue = 1`, 1, "X: x"}, {"bytes", `queue_bytes = 3000`, 1, "X: " + strings.Repeat("x", 2000)}, {"many headers", `queue_bytes = 1_000_000`, 1, strings.TrimSpace(many.String())},
		{"endless body", `queue_bytes = 3000`, 1, "Content-Length: 9223372036854775807"}, {"wait", `wait = "1ms"`, 0, "X: x"}} {
		t.Run(c.name, func(t *testing.T) {
			wait := ""
			if c.name != "wait" {
				wait = `wait = "10m"`
			}
			g := serve(t, one(url, "[[class]]\nname = \"c\"", c.bound, wait), nil)
			done := make(chan struct{})
			ask := func() {
				conn, r := g.dial(t)
				write(t, conn, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
				go func() {
					defer func() { done <- struct{}{} }()
					if res, err := http.ReadResponse(r, nil); err != nil || res.StatusCode != http.StatusOK {
						t.Errorf("%v, %v", res, err)
					}
				}()
			}
			ask()
			<-arrived
			for range c.waiting {
				ask()
			}
			testkit.WaitFor(t, "one waits", func() bool { return g.Status().Classes[0].Queued == c.waiting })
			refused(t, g, c.header)
			s := g.Status().Classes[0]
			if c.waiting > 0 && s.Full != 1 || c.waiting == 0 && s.Late != 1 {
				t.Errorf("%+v", s)
			}
			for range 1 + c.waiting {
				release <- struct{}{}
				<-done
			}
			g.idle(t)
			for len(arrived) > 0 {
				<-arrived
			}
		})
	}
}

// A request that two servers might read differently reaches no server.
func TestAmbiguousRequestsReachNoServer(t *testing.T) {
	var paths []string
	url := backend(t, func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		paths = append(paths, r.URL.Path)
	})
	g := serve(t, one(url), nil)
	const smuggled = "GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
	for _, request := range []string{
		"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + smuggled,
		"POST /x HTTP/1.1\r\nHost: a\r\ntransfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n" + smuggled,
		"POST /x HTTP/1.0\r\nHost: a\r\nConnection: keep-alive\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + smuggled,
		"POST /x HTTP/1.0\r\nHost: a\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + smuggled,
		"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + smuggled,
		"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + smuggled,
		"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + smuggled,
		"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + smuggled,
		"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: +4\r\n\r\n0\r\n\r\n" + smuggled,
		"GET /x HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n" + smuggled,
		"GET /x HTTP/1.1\r\n\r\n" + smuggled,
	} {
		for _, whole := range []bool{true, false} {
			c, r := g.dial(t)
			if whole {
				write(t, c, request)
			} else {
				head, _, _ := strings.Cut(request, "\r\n\r\n")
				for i := range len(head) + 4 {
					write(t, c, request[i:i+1])
				}
			}
			res, _ := answer(t, r)
			if res.StatusCode < 400 || res.StatusCode > 501 || !res.Close {
				t.Errorf("%q: %s, close %v", request, res.Status, res.Close)
			}
			if more, err := http.ReadResponse(r, nil); err == nil {
				t.Errorf("%q: then %s", request, more.Status)
			}
			c.Close()
		}
	}
	// A body may end in the middle of a line, and the next head begins there.
	for _, before := range []string{"hello", "a\nhello", "POST /x HTTP/1.1\nhello"} {
		c, r := g.dial(t)
		write(t, c, fmt.Sprintf("POST /before HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s", len(before), before))
		if res, _ := answer(t, r); res.StatusCode != http.StatusOK {
			t.Error(res.Status)
		}
		write(t, c, "POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"+smuggled)
		if res, _ := answer(t, r); res.StatusCode != http.StatusBadRequest || !res.Close {
			t.Errorf("after %q: %s, close %v", before, res.Status, res.Close)
		}
		if more, err := http.ReadResponse(r, nil); err == nil {
			t.Errorf("after %q: then %s", before, more.Status)
		}
	}
	paths = nil
	// The gateway does not read a request head inside a body.
	c, r := g.dial(t)
	body := "POST /ok HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
	write(t, c, fmt.Sprintf("POST /body HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s", len(body), body))
	write(t, c, "POST /last HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
	for range 2 {
		if res, _ := answer(t, r); res.StatusCode != http.StatusOK {
			t.Error(res.Status)
		}
	}
	g.idle(t)
	testkit.Equal(t, strings.Join(paths, " "), "/body /last", "the server")
}

// A client that is refused while it sends gets the answer, and then the end of the connection, not a
// reset.
func TestRefusedWhileSending(t *testing.T) {
	g := serve(t, one("http://127.0.0.1:1"), func(c *Config) { c.MaxBody = 1000 })
	c, r := g.dial(t)
	write(t, c, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10000000\r\n\r\n"+strings.Repeat("x", 10_000))
	if res, _ := answer(t, r); res.StatusCode != http.StatusRequestEntityTooLarge {
		t.Error(res.Status)
	}
	if _, ok := any(&framedConn{}).(interface{ CloseWrite() error }); !ok {
		t.Error("net/http cannot end its side first")
	}
	if rest, err := io.ReadAll(r); err != nil || len(rest) > 0 {
		t.Errorf("%q, %v", rest, err)
	}
}

// An operation that takes too long is ended, and the log names the side at fault.
func TestTimeouts(t *testing.T) {
	for _, test := range []struct {
		name, says      string
		code            int    // 0: the connection ends without an answer
		body            string // as far as the answer's body comes
		failed, aborted uint64
	}{
		{"no head", "GET / HTTP/1.1\r\nHost: a\r\n", 0, "", 0, 0}, // slowloris
		{"no body", "POST /body HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nhalf", http.StatusRequestTimeout, "the body did not come in time\n", 0, 1},
		{"no answer", "GET /never HTTP/1.1\r\nHost: a\r\n\r\n", http.StatusGatewayTimeout, "the server did not answer in time\n", 1, 0},
		{"half an answer", "GET /stall HTTP/1.1\r\nHost: a\r\n\r\n", http.StatusOK, "some", 1, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			testkit.Bubble(t, func(t *testing.T) {
				g, dial := inMemory(t, patient)
				c := dial()
				defer c.Close()
				testkit.Result(io.WriteString(c, test.says)).Must(t)
				if r := bufio.NewReader(c); test.code == 0 {
					_, err := io.ReadAll(r)
					testkit.NoError(t, err)
				} else {
					res := testkit.Result(http.ReadResponse(r, nil)).Must(t)
					body, err := io.ReadAll(res.Body)
					if cut := err != nil; res.StatusCode != test.code || string(body) != test.body || cut != (test.code == http.StatusOK) {
						t.Errorf("%s, %q, %v", res.Status, body, err)
					}
				}
				synctest.Wait()
				if s := g.Status().Servers[0]; s.InFlight != 0 || s.Failed != test.failed || s.Aborted != test.aborted {
					t.Errorf("%+v", s)
				}
			})
		})
	}
	t.Run("a client that does not read", func(t *testing.T) {
		testkit.Bubble(t, func(t *testing.T) {
			g, dial := inMemory(t, patient)
			c := dial()
			defer c.Close()
			testkit.Result(io.WriteString(c, "GET /flood?1000000000000 HTTP/1.1\r\nHost: a\r\n\r\n")).Must(t)
			<-time.After(10 * time.Minute)
			if s := g.Status().Servers[0]; s.InFlight != 0 || s.Aborted != 1 || s.Failed != 0 {
				t.Errorf("%+v", s)
			}
		})
	})
	// The client is slow between requests, not within a request.
	t.Run("a connection in use", func(t *testing.T) {
		testkit.Bubble(t, func(t *testing.T) {
			_, dial := inMemory(t, patient)
			c := dial()
			defer c.Close()
			r := bufio.NewReader(c)
			for range 3 {
				testkit.Result(io.WriteString(c, "POST /body HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi")).Must(t)
				if res, _ := answer(t, r); res.StatusCode != http.StatusOK {
					t.Error(res.Status)
				}
				<-time.After(50 * time.Second) // longer than the head and the body of a request may take
			}
		})
	})
}

// patient is a server that ends nothing by itself.
func patient(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/body":
		_, _ = io.Copy(io.Discard, r.Body)
		return
	case "/stall":
		fmt.Fprint(w, "some")
		_ = http.NewResponseController(w).Flush()
	case "/flood":
		if length := r.URL.RawQuery; length != "" { // without a length, ReverseProxy waits on a mutex, which synctest cannot see
			w.Header().Set("Content-Length", length)
		}
		block := make([]byte, 1<<20)
		for r.Context().Err() == nil {
			if _, err := w.Write(block); err != nil {
				return
			}
		}
	}
	<-r.Context().Done()
}

// A client that reads nothing also loses its place, once the socket buffers are full.
func TestSocketThatIsNotRead(t *testing.T) {
	g := serve(t, one(backend(t, patient), "[timeouts]", `response = "100ms"`), nil)
	c, _ := g.dial(t)
	write(t, c, "GET /flood HTTP/1.1\r\nHost: a\r\n\r\n")
	testkit.WaitFor(t, "the end of it", func() bool { s := g.Status().Servers[0]; return s.Sent == 1 && s.Aborted+s.Failed == 1 })
	g.idle(t)
}

// A policy change takes along the waiting requests and the requests at a server.
func TestSetPolicy(t *testing.T) {
	arrived, release := make(chan string, 10), make(chan struct{})
	url := backend(t, func(_ http.ResponseWriter, r *http.Request) { arrived <- r.URL.Path; <-release })
	other := backend(t, func(_ http.ResponseWriter, r *http.Request) { arrived <- "other" + r.URL.Path })
	class := func(name string) string { return fmt.Sprintf("[[class]]\nname = %q\nwait = \"10m\"", name) }
	g := serve(t, one(url, class("a")), nil)
	ask := func(path string) *bufio.Reader {
		c, r := g.dial(t)
		write(t, c, "GET "+path+" HTTP/1.1\r\nHost: a\r\n\r\n")
		return r
	}
	first := ask("/1")
	testkit.MustEqual(t, <-arrived, "/1")
	second := ask("/2")
	testkit.WaitFor(t, "the second waits", func() bool { return g.Status().Classes[0].Queued == 1 })
	// The class is removed, and the server is still busy.
	testkit.Must(t, g.SetPolicy(parse(t, one(url, class("b")))))
	if s := g.Status(); s.Classes[0].Name != "b" || s.Classes[0].Queued != 1 || s.Servers[0].InFlight != 1 || s.Servers[0].Free["cpu"] != 0 {
		t.Errorf("%+v", s)
	}
	// A faulty policy changes nothing.
	bad := parse(t, one(other))
	bad.Classes[0].Weight = 0
	if err := g.SetPolicy(bad); err == nil {
		t.Error("a weight of 0 was taken")
	}
	// The new policy has another server, which is free. The second request goes there.
	testkit.Must(t, g.SetPolicy(parse(t, one(other, class("b")))))
	testkit.Equal(t, <-arrived, "other/2")
	if res, _ := answer(t, second); res.StatusCode != http.StatusOK {
		t.Error(res.Status)
	}
	close(release) // the handler of the removed server
	if res, _ := answer(t, first); res.StatusCode != http.StatusOK {
		t.Error(res.Status)
	}
	g.idle(t)
	if s := g.Status(); len(s.Servers) != 1 || s.Servers[0].URL != other {
		t.Errorf("%+v", s.Servers)
	}
	testkit.Must(t, g.SetPolicy(parse(t, one(other, "[timeouts]\ndrain = \"5s\""))))
	testkit.Equal(t, g.Drain(), 5*time.Second, "to empty the queues")
}

// A request may learn of a refusal by an old policy only after the next policy, which has fewer
// classes.
func TestRefusedByAnOlderPolicy(t *testing.T) {
	class := func(name string, queue int) string {
		return fmt.Sprintf("[[class]]\nname = %q\nqueue = %d\nwait = \"10m\"\n", name, queue)
	}
	cfg := Config{Policy: parse(t, one("http://a", class("a", 1), class("b", 2))), Scheduler: "mqos", Gateways: 1, Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry()}
	p := testkit.Result(New(cfg)).Must(t)
	d := p.dispatcher
	at := func(path string) *ticket {
		t := &ticket{r: httptest.NewRequest(http.MethodGet, path, nil), granted: make(chan struct{}, 1)}
		t.class.Class = &policy.Class{Name: "b"}
		return t
	}
	sent, waits, refused := at("/1"), at("/2"), at("/3")
	// Repeats what enter does before it waits.
	for _, x := range []*ticket{sent, waits, refused} {
		d.mu.Lock()
		d.fillLocked(x)
		testkit.Must(t, d.mu.schedule.Arrive(&x.request))
		d.mu.tickets.Push(&x.place, x)
		d.sendLocked(1)
		d.mu.Unlock()
	}
	for _, text := range []string{one("http://a", class("a", 1), class("b", 1)), one("http://a", class("b", 1))} {
		testkit.Must(t, p.SetPolicy(parse(t, text)))
	}
	<-refused.granted
	if refused.refused == nil {
		t.Error("it was sent")
	}
	if s := p.Status().Classes[0]; s.Full != 1 || s.Queued != 1 || s.InFlight != 1 {
		t.Errorf("%+v", s)
	}
}
