package proxy

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/gateway/policy"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/testkit"
)

// A body holds a place at a server as long as the client sends fast enough. The gateway does not cut a
// body while something other than the client delays the body. Nor does it cut bodies that the policy
// allows, or streams that are not bodies.
func TestSlowBodies(t *testing.T) {
	const minutes = 10
	for _, test := range []struct {
		name, head  string
		bytes, size int // number and size of the pieces
		every       time.Duration
		code        int
	}{
		{"a byte every 29 s", "POST /bulk", 20, 1, 29 * time.Second, http.StatusRequestTimeout},
		{"half the rate", "POST /bulk", 100, 1024, 2 * time.Second, http.StatusRequestTimeout},
		{"a little more than the rate", "POST /bulk", 300, 2100, 2 * time.Second, http.StatusOK},
		{"little, soon", "POST /bulk", 25, 1, time.Second, http.StatusOK},
		{"the server takes its time", "POST /slow", 300, 1024, 0, http.StatusOK},
		{"allowed to", "POST /stream", 20, 1, 29 * time.Second, http.StatusOK},
		{"allowed to, not for ever between two", "POST /stream", 20, 1, 31 * time.Second, http.StatusRequestTimeout},
		{"upgraded", "GET /socket", 20, 1, 29 * time.Second, http.StatusSwitchingProtocols},
	} {
		t.Run(test.name, func(t *testing.T) {
			testkit.Bubble(t, func(t *testing.T) {
				g, dial := inMemory(t, func(w http.ResponseWriter, r *http.Request) {
					if r.URL.Path == "/socket" {
						c, rw, err := http.NewResponseController(w).Hijack()
						if err != nil {
							t.Error(err)
							return
						}
						defer c.Close()
						fmt.Fprint(rw, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
						if rw.Flush() == nil {
							_, _ = io.CopyN(c, rw, int64(test.bytes))
						}
						return
					}
					if r.URL.Path == "/slow" {
						<-time.After(minutes * time.Minute)
					}
					n, _ := io.Copy(io.Discard, r.Body)
					fmt.Fprint(w, n)
				})
				c, sent := dial(), make(chan struct{})
				began := time.Now()
				go func() {
					defer close(sent)
					framing := fmt.Sprintf("Content-Length: %d", test.bytes*test.size)
					if test.code == http.StatusSwitchingProtocols {
						framing = "Connection: Upgrade\r\nUpgrade: websocket"
					}
					_, err := fmt.Fprintf(c, "%s HTTP/1.1\r\nHost: a\r\n%s\r\n\r\n", test.head, framing)
					for i := 0; i < test.bytes && err == nil; i++ {
						<-time.After(test.every)
						_, err = io.WriteString(c, strings.Repeat("x", test.size)) // or the gateway cuts the body, as it may
					}
				}()
				r := bufio.NewReader(c)
				res, err := http.ReadResponse(r, nil)
				if err != nil {
					t.Error(err)
					res = &http.Response{Body: http.NoBody}
				}
				took := time.Since(began)
				testkit.Equal(t, res.StatusCode, test.code, "%s after %v", res.Status, took)
				switch res.StatusCode {
				case http.StatusRequestTimeout:
					if took > 2*time.Minute {
						t.Errorf("held a place for %v", took)
					}
				case http.StatusSwitchingProtocols:
					if _, err := io.ReadFull(r, make([]byte, test.bytes)); err != nil {
						t.Errorf("of a tunnel, after %v: %v", time.Since(began), err)
					}
				default:
					if body, err := io.ReadAll(res.Body); err != nil || string(body) != fmt.Sprint(test.bytes*test.size) {
						t.Errorf("%q, %v", body, err)
					}
				}
				_ = c.Close()
				<-sent
				synctest.Wait()
				if s := g.Status().Servers[0]; s.InFlight != 0 {
					t.Errorf("%+v", s)
				}
			})
		})
	}
}

// A client pays as others do for requests that the client cancels before the answers, because the
// server continues to work.
func TestRequestsTakenBack(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		g, dial := inMemory(t, func(http.ResponseWriter, *http.Request) { <-time.After(time.Second) })
		ask := func() net.Conn {
			c := dial()
			testkit.Result(io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")).Must(t)
			return c
		}
		used := func() float64 { return g.Status().Classes[1].Used["time"] }
		c := ask()
		testkit.Result(http.ReadResponse(bufio.NewReader(c), nil)).Must(t)
		_ = c.Close()
		synctest.Wait()
		once := used()
		c = ask()
		<-time.After(10 * time.Millisecond)
		_ = c.Close()
		synctest.Wait()
		if s := g.Status().Servers[0]; s.Departed != 1 || s.Aborted != 1 || used() != 2*once {
			t.Errorf("%v %% once, then %v %% in all; %+v", once, used(), s)
		}
		<-time.After(time.Second) // the server has ended, too
	})
}

// inMemory is a gateway in front of one server, without sockets.
func inMemory(t *testing.T, h http.HandlerFunc) (p *Proxy, dial func() net.Conn) {
	p, err := New(Config{
		Policy:    parse(t, "[[class]]\nname = \"streams\"\nmin_body_rate = 0\nmatch = [{ path = \"/stream\" }]\n[[server]]\nurl = \"http://a\""),
		Scheduler: "mqos", Gateways: 1, Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry(),
	})
	testkit.Must(t, err)
	guard := testkit.Result(secure.ServerConfig{}.Load()).Must(t)
	front, back := pipes(make(chan net.Conn)), pipes(make(chan net.Conn))
	transport := p.rules.Load().transports[policy.Reach{}]
	transport.DialContext = func(context.Context, string, string) (net.Conn, error) { return back.dial(), nil }
	web, server := p.Server(64<<10), &http.Server{Handler: h}
	go func() { _ = web.Serve(p.Listener(front, guard)) }()
	go func() { _ = server.Serve(back) }()
	t.Cleanup(func() {
		p.end()
		_ = web.Close()
		transport.CloseIdleConnections()
		_ = server.Close()
	})
	return p, front.dial
}

// pipes is a listener whose connections are net.Pipes, which work with virtual time.
type pipes chan net.Conn

func (l pipes) dial() net.Conn {
	ours, theirs := net.Pipe()
	l <- theirs
	return ours
}

func (l pipes) Accept() (net.Conn, error) {
	if c, ok := <-l; ok {
		return c, nil
	}
	return nil, net.ErrClosed
}

func (l pipes) Close() error   { close(l); return nil }
func (l pipes) Addr() net.Addr { return &net.TCPAddr{} }
