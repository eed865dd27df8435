package client_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/server"
	"github.com/srtm-io/srtm/admission/store"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// serve runs a server with these rules.
func serve(t testing.TB, rules ...rule.Rule) netip.AddrPort {
	t.Helper()
	at, _ := stoppable(t, rules...)
	return at
}

// stoppable is serve with a function that stops the server.
func stoppable(t testing.TB, rules ...rule.Rule) (at netip.AddrPort, stop func()) {
	t.Helper()
	s := testkit.Result(store.Open(t.Context(), filepath.Join(t.TempDir(), "admission.db"))).Must(t)
	testkit.Result(s.SetRules(t.Context(), rules)).Must(t)
	srv := testkit.Result(server.New(t.Context(), server.Config{Address: "127.0.0.1:0", Store: server.NewStore(s)})).Must(t)
	return srv.Addr(), testkit.Run(t, func(ctx context.Context) error { return errors.Join(srv.Run(ctx), s.Close()) })
}

func dial(t *testing.T, cfg client.Config) *client.Client {
	t.Helper()
	c := testkit.Result(client.New(cfg)).Must(t)
	t.Cleanup(func() {
		c.Close()
		c.Close() // closes no server
	})
	return c
}

// lossy passes datagrams between one client and a server. It loses, repeats and reorders some
// datagrams.
func lossy(t *testing.T, to netip.AddrPort) string {
	t.Helper()
	front := testkit.Result(net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})).Must(t)
	back, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
	testkit.Must(t, err)
	var running sync.WaitGroup
	t.Cleanup(func() { front.Close(); back.Close(); running.Wait() })
	var asker atomic.Pointer[netip.AddrPort]
	seed := testkit.Seed(t)
	pass := func(stream uint64, read func([]byte) (int, error), write func([]byte)) {
		rng := rand.New(rand.NewPCG(seed, stream))
		var held []byte
		for {
			buf := make([]byte, 1000)
			n, err := read(buf)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				continue
			}
			switch d := buf[:n]; rng.IntN(6) {
			case 0: // lost
			case 1: // twice
				write(d)
				write(d)
			case 2: // after the next
				held, d = d, held
				if d != nil {
					write(d)
				}
			default:
				write(d)
				if held != nil {
					write(held)
					held = nil
				}
			}
		}
	}
	running.Go(func() {
		pass(1, func(b []byte) (int, error) {
			n, from, err := front.ReadFromUDPAddrPort(b)
			if err == nil {
				asker.Store(&from)
			}
			return n, err
		}, func(b []byte) { back.Write(b) })
	})
	running.Go(func() {
		pass(2, back.Read, func(b []byte) {
			if to := asker.Load(); to != nil {
				front.WriteToUDPAddrPort(b, *to)
			}
		})
	})
	return front.LocalAddr().String()
}

// The network loses a sixth of all datagrams, and repeats and reorders others. Each question is still
// decided, and charged once.
func TestEachQuestionIsChargedOnce(t *testing.T) {
	const questions = 400
	to := serve(t, rule.Rule{Key: "key", Share: tokenbucket.Share{Rate: 1, Burst: 1000}})
	c := dial(t, client.Config{Servers: []string{lossy(t, to)}, Attempts: 10_000, Wait: testkit.Hang})
	var asking sync.WaitGroup
	for range 8 {
		asking.Go(func() {
			for range questions / 8 {
				if d := c.Ask(t.Context(), "key", 1); d.Unanswered || !d.Admit {
					t.Errorf("%+v", d)
				}
			}
		})
	}
	asking.Wait()
	sure := dial(t, client.Config{Servers: []string{to.String()}, Attempts: 10_000, Wait: testkit.Hang})
	testkit.Equal(t, sure.Peek(t.Context(), "key", 0).Left, 1000-questions, "credits left of 1000 after %d questions", questions)
}

func TestNobodyAnswers(t *testing.T) {
	silent := testkit.Result(net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})).Must(t)
	defer silent.Close()
	refused := testkit.Result(net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})).Must(t)
	refused.Close()
	for _, server := range []string{silent.LocalAddr().String(), refused.LocalAddr().String()} {
		c := dial(t, client.Config{Servers: []string{server}, DefaultFor: map[string]bool{"open/": true, "open/not/": false}})
		for key, admit := range map[string]bool{"key": false, "open/1": true, "open/not/1": false} {
			testkit.Equal(t, c.Ask(t.Context(), key, 1), (client.Decision{Admit: admit, Unanswered: true}), "%s", key)
		}
	}
	// However long the client would retry, the question ends with its context and with Close.
	c := dial(t, client.Config{Servers: []string{silent.LocalAddr().String()}, DefaultAdmit: true, Attempts: 1 << 30, Wait: testkit.Hang})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if d := c.Ask(ctx, "key", 1); !d.Admit || !d.Unanswered {
		t.Errorf("%+v", d)
	}
	closed := testkit.Result(client.New(client.Config{Servers: []string{silent.LocalAddr().String()}, Attempts: 1 << 30, Wait: testkit.Hang})).Must(t)
	done := make(chan client.Decision)
	go func() { done <- closed.Ask(t.Context(), "key", 1) }()
	closed.Close() // before the question, or during the question
	if d := <-done; !d.Unanswered {
		t.Errorf("%+v after Close", d)
	}
}

// If a client knows several servers, the client prefers a server that has answered. One server is
// cut off.
func TestAnotherServerIsCutOff(t *testing.T) {
	owner := serve(t, rule.Rule{Key: "key1", Share: tokenbucket.Share{Rate: 1, Burst: 10}}).String()
	silent := testkit.Result(net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})).Must(t)
	defer silent.Close()
	c := dial(t, client.Config{Servers: []string{owner}, Attempts: 1000, Wait: testkit.Hang})
	if d := c.Ask(t.Context(), "key1", 1); !d.Admit {
		t.Fatalf("%+v", d)
	}
	for _, servers := range [][]string{{owner, silent.LocalAddr().String()}, {silent.LocalAddr().String(), owner}} {
		testkit.Must(t, c.SetServers(servers))
		if d := c.Ask(t.Context(), "key1", 1); d.Unanswered {
			t.Errorf("%+v", d)
		}
	}
}

// A client treats servers that are named twice as if they were named once.
func TestServersThatAreNamedTwice(t *testing.T) {
	to := serve(t, rule.Rule{Key: "key", Share: tokenbucket.Share{Rate: 1, Burst: 10}}).String()
	c := dial(t, client.Config{Servers: []string{to, to}, Attempts: 10_000, Wait: testkit.Hang})
	for range 2 {
		testkit.Must(t, c.SetServers([]string{to, to}))
		if d := c.Ask(t.Context(), "key", 1); !d.Admit {
			t.Errorf("%+v", d)
		}
	}
}

func TestLimitRefusesAboveTheRule(t *testing.T) {
	to := serve(t, rule.Rule{Key: "user/1", Share: tokenbucket.Share{Rate: 100, Burst: 1}})
	c := dial(t, client.Config{Servers: []string{to.String()}, Attempts: 10_000, Wait: testkit.Hang})
	h := c.Limit(func(r *http.Request) string { return r.Header.Get("User") }, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) }))
	for i, want := range []struct {
		user  string
		code  int
		after string
	}{{"user/1", http.StatusTeapot, ""}, {"user/1", http.StatusTooManyRequests, "10"}, {"", http.StatusTeapot, ""}, {"user/2", http.StatusTooManyRequests, ""}} {
		r := httptest.NewRequest("GET", "/", nil)
		r.Header.Set("User", want.user)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code != want.code || w.Header().Get("Retry-After") != want.after {
			t.Errorf("request %d: %d, Retry-After %q, want %+v", i, w.Code, w.Header().Get("Retry-After"), want)
		}
	}
}

func TestNewRefusesInvalidConfigs(t *testing.T) {
	for _, cfg := range []client.Config{{}, {Servers: []string{"nowhere"}}, {Servers: make([]string, 5000)}} {
		if c, err := client.New(cfg); err == nil {
			c.Close()
			t.Errorf("%d servers were taken", len(cfg.Servers))
		}
	}
}
