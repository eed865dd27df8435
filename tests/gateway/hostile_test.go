package gateway

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// metric sums a metric of the gateway over its labels.
func (g *running) metric(t testing.TB, name string) float64 {
	t.Helper()
	return testkit.Result(localtest.Metric(&local.Process{HTTP: strings.TrimPrefix(g.admin, "http://")}, name)).Must(t)
}

// settled waits until no request waits or is at a server, all capacity is free, and each sent request
// has ended once. Requests that clients have sent may be read later.
func (g *running) settled(t testing.TB) {
	t.Helper()
	testkit.WaitFor(t, "an end of all requests", func() bool {
		var sent float64
		for _, s := range g.status(t).Servers {
			for name := range s.Capacity {
				if s.Free[name] != s.Capacity[name] {
					return false
				}
			}
			sent += float64(s.Sent)
		}
		return g.metric(t, "srtm_gateway_queued") == 0 && g.metric(t, "srtm_gateway_in_flight") == 0 &&
			g.metric(t, "srtm_gateway_server_requests_total") == sent
	})
}

// get sends an ordinary client's request, and fails without an answer.
func (g *running) get(t testing.TB, path string) {
	t.Helper()
	client := newClient(t)
	res, err := client.Get(g.URL + path)
	testkit.Must(t, err)
	if _, err := io.Copy(io.Discard, res.Body); err != nil || res.StatusCode != http.StatusOK {
		t.Errorf("%s: %s, %v", path, res.Status, err)
	}
	res.Body.Close()
}

// Clients disconnect while they wait, with and without a body, while the policy changes. Their places
// become free, and other charges are returned once.
func TestClientsLeaveWhileThePolicyChanges(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-release:
		case <-r.Context().Done():
		}
	}))
	defer server.Close()
	policy := func(name string, cpu int) string {
		return fmt.Sprintf("[[class]]\nname = %q\nwait = \"10m\"\n[[server]]\nurl = %q\ncpu = %d\n[[cost]]\npath = \"/\"\ncpu = 1000\n", name, server.URL, cpu)
	}
	g := start(t, policy("c0", 1))
	const round = 30
	for i := 1; i <= 2; i++ {
		var clients []net.Conn
		for n := range round {
			c := testkit.Result(net.Dial("tcp", strings.TrimPrefix(g.URL, "http://"))).Must(t)
			defer c.Close()
			clients = append(clients, c)
			request := []string{"GET / HTTP/1.1\r\nHost: a\r\n\r\n", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\nhalf", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nfull"}[n%3]
			testkit.Result(io.WriteString(c, request)).Must(t)
		}
		testkit.WaitFor(t, "requests that wait", func() bool {
			c := g.status(t).Classes[0]
			return c.Queued >= round-1
		})
		name := fmt.Sprint("c", i)
		rewrite(t, g.policy, policy(name, 1+i%2))
		for _, c := range clients[:round/2] {
			c.Close()
		}
		testkit.WaitFor(t, "the new policy", func() bool { return g.status(t).Classes[0].Name == name })
		for _, c := range clients[round/2:] {
			c.Close()
		}
		testkit.WaitFor(t, "an empty queue", func() bool { return g.status(t).Classes[0].Queued == 0 })
	}
	g.settled(t)
	close(release)
	g.get(t, "/")
	g.settled(t)
}

// Servers may report anything about themselves and about requests.
func TestServersLie(t *testing.T) {
	t.Parallel()
	names := strings.Builder{}
	for i := range 10_000 {
		fmt.Fprintf(&names, ",request_cost.n%d=1", i)
	}
	lies := []string{
		"TEXT request_cost.cpu=-1", "TEXT request_cost.cpu=NaN,cpu_utilization=NaN", "TEXT request_cost.cpu=+Inf",
		"TEXT request_cost.cpu=1e308,cpu_utilization=1e308,named_metrics.inflight=1e308", "TEXT request_cost.cpu=1e309",
		`JSON {"request_cost":{"cpu":-1e308}}`, `JSON {"request_cost":[[{"cpu":1}]],"utilization":7}`, `JSON {"request_cost":{"cpu":{"cpu":1}}}`,
		"JSON " + strings.Repeat("[", 8000), "TEXT cpu_utilization=0" + names.String()[:8000], "TEXT cpu_utilization=0" + names.String(),
		"BIN \xff\xfe", "[[cost]]", strings.Repeat("x", 100<<10), strings.Repeat("x", 300<<10),
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var i int
		if _, err := fmt.Sscanf(r.URL.Path, "/lie/%d", &i); err == nil {
			w.Header()["endpoint-load-metrics"] = []string{lies[i], lies[(i+1)%4]}
		}
	}))
	defer server.Close()
	g := start(t, fmt.Sprintf("[[class]]\nname = \"lied\"\nmatch = [{ path = \"/lie/\" }]\n[[class]]\nname = \"honest\"\n[[server]]\nurl = %q\ncpu = 1000\n", server.URL))
	client := newClient(t)
	for range 3 {
		for i := range lies {
			res := testkit.Result(client.Get(fmt.Sprint(g.URL, "/lie/", i))).Must(t)
			res.Body.Close()
			if len(lies[i]) < 256<<10 && res.StatusCode != http.StatusOK || res.Header.Get("Endpoint-Load-Metrics") != "" {
				t.Errorf("%.40q: %s, %.40q", lies[i], res.Status, res.Header.Get("Endpoint-Load-Metrics"))
			}
			g.get(t, "/")
		}
	}
	g.settled(t)
	if n := g.metric(t, "srtm_gateway_bad_reports_total"); n < 3*9 {
		t.Errorf("%v reports were refused", n)
	}
	for _, c := range g.status(t).Classes {
		// A request is charged at most 10,000 %, and four requests of each round reported so much.
		if used := c.Used["cpu"]; !(used >= 0 && used <= 10_000*float64(c.Sent)) || c.Name == "honest" && used > 100*float64(c.Sent) {
			t.Errorf("%+v", c)
		}
	}
}

// Tunnels end with either end, however the end happens, and leave nothing behind.
func TestTunnelsLeaveNothing(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var tunnels []net.Conn
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") == "" {
			return
		}
		c, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		fmt.Fprint(rw, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		testkit.NoError(t, rw.Flush())
		mu.Lock()
		defer mu.Unlock()
		tunnels = append(tunnels, c)
	}))
	defer server.Close()
	g := start(t, fmt.Sprintf("[timeouts]\nresponse = \"1s\"\n[[server]]\nurl = %q\n", server.URL))
	g.get(t, "/")
	goroutines, descriptors := g.metric(t, "go_goroutines"), g.metric(t, "process_open_fds")
	reset := func(c net.Conn) {
		testkit.NoError(t, c.(*net.TCPConn).SetLinger(0))
		c.Close()
	}
	const n = 60
	for range 2 {
		var clients []net.Conn
		for range n {
			c, err := net.Dial("tcp", strings.TrimPrefix(g.URL, "http://"))
			if err == nil {
				_, err = io.WriteString(c, "GET /socket HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
			}
			if err == nil {
				_, err = io.ReadFull(c, make([]byte, len("HTTP/1.1 101")))
			}
			testkit.Must(t, err)
			clients = append(clients, c)
		}
		if now := g.metric(t, "process_open_fds"); now < descriptors+n {
			t.Fatalf("%v descriptors with %d tunnels, %v without", now, n, descriptors)
		}
		mu.Lock()
		for i := range clients {
			switch i % 4 { // the remaining end learns of the end from the gateway
			case 0:
				reset(clients[i])
			case 1:
				clients[i].Close()
			case 2:
				reset(tunnels[i])
			case 3:
				tunnels[i].Close()
			}
		}
		mu.Unlock()
		// Apart from the gateway's own idle connections to the server.
		testkit.WaitFor(t, "an end of all tunnels", func() bool {
			return g.metric(t, "go_goroutines") <= goroutines+10 && g.metric(t, "process_open_fds") <= descriptors+10
		})
		mu.Lock()
		for i := range clients {
			clients[i].Close()
			tunnels[i].Close()
		}
		tunnels = nil
		mu.Unlock()
	}
	g.settled(t)
}

// h2 is an HTTP/2 client that writes arbitrary frames.
type h2 struct {
	net.Conn
	*http2.Framer
	block  bytes.Buffer
	fields *hpack.Encoder
	done   chan struct{} // closed when the gateway has ended the connection
}

func dialH2(t testing.TB, g *running, settings ...http2.Setting) *h2 {
	t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(g.URL, "http://"))
	if err == nil {
		_, err = io.WriteString(c, http2.ClientPreface)
	}
	testkit.Must(t, err)
	h := &h2{Conn: c, Framer: http2.NewFramer(c, c), done: make(chan struct{})}
	h.fields = hpack.NewEncoder(&h.block)
	testkit.Must(t, h.WriteSettings(settings...))
	go func() { // the client ignores what it receives
		defer close(h.done)
		_, _ = io.Copy(io.Discard, c)
	}()
	t.Cleanup(func() { c.Close(); <-h.done })
	return h
}

// head encodes the head of a request.
func (h *h2) head(method, path string) []byte {
	h.block.Reset()
	for _, f := range [][2]string{{":method", method}, {":scheme", "http"}, {":authority", "a"}, {":path", path}} {
		_ = h.fields.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]}) // a Buffer takes all
	}
	return h.block.Bytes()
}

func (h *h2) ask(stream uint32, method, path string) error {
	return h.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: h.head(method, path), EndHeaders: true, EndStream: method == http.MethodGet})
}

// An HTTP/2 client's permitted frames cost other clients nothing, and little memory: requests that are
// cancelled at once (CVE-2023-44487), heads that never end (CVE-2023-45288), and windows that never
// open.
func TestHostileHTTP2(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if r.URL.Path == "/large" {
			_, _ = w.Write(make([]byte, 1<<20))
		}
	}))
	defer server.Close()
	g := start(t, fmt.Sprintf("[timeouts]\nresponse = \"1s\"\nbody = \"1s\"\n[[class]]\nname = \"c\"\nqueue = 100\n[[server]]\nurl = %q\n", server.URL))
	g.get(t, "/")
	most := g.metric(t, "go_memstats_heap_inuse_bytes") + 128<<20
	bounded := func(t *testing.T) {
		t.Helper()
		g.get(t, "/")
		if heap := g.metric(t, "go_memstats_heap_inuse_bytes"); heap > most {
			t.Errorf("%v bytes of heap, %v allowed", heap, most)
		}
	}
	t.Run("rapid reset", func(t *testing.T) {
		var clients sync.WaitGroup
		for range 4 {
			h := dialH2(t, g)
			clients.Go(func() {
				for i := range uint32(500) {
					if h.ask(2*i+1, http.MethodGet, "/large") != nil || h.WriteRSTStream(2*i+1, http2.ErrCodeCancel) != nil {
						return // the gateway may cut the connection
					}
				}
			})
		}
		clients.Wait()
		g.settled(t)
		bounded(t)
	})
	t.Run("heads without end", func(t *testing.T) {
		h := dialH2(t, g)
		testkit.Must(t, h.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: h.head(http.MethodGet, "/"), EndStream: true}))
		h.block.Reset()
		for h.block.Len() < 15<<10 {
			_ = h.fields.WriteField(hpack.HeaderField{Name: "x", Value: "y", Sensitive: true})
		}
		cut := false
		for range 16 << 10 { // 240 MiB
			if cut = h.WriteContinuation(1, false, h.block.Bytes()) != nil; cut {
				break
			}
		}
		if !cut {
			t.Error("it was read to the end")
		}
		bounded(t)
	})
	t.Run("windows that never open, bodies that never come", func(t *testing.T) {
		for range 4 {
			h := dialH2(t, g, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
			for i := range uint32(20) {
				testkit.Must(t, h.ask(4*i+1, http.MethodGet, "/large"))
				testkit.Must(t, h.ask(4*i+3, http.MethodPost, "/"))
			}
		}
		testkit.WaitFor(t, "requests that hold places", func() bool { return g.metric(t, "srtm_gateway_in_flight") > 0 })
		g.settled(t)
		bounded(t)
	})
}
