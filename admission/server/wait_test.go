package server_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"regexp"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/server"
	"github.com/srtm-io/srtm/admission/table"
	"github.com/srtm-io/srtm/admission/wire"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

// slow is a store that answers lookups of keys when pass returns.
type slow struct {
	server.Store
	pass  func()
	asked atomic.Int64
}

func (s *slow) Credits(ctx context.Context, keys []string) (map[string]table.Credit, error) {
	s.asked.Add(1)
	s.pass()
	return s.Store.Credits(ctx, keys)
}

// slowBench is a bench whose keys earn a credit in 1000 s.
func slowBench(t *testing.T, pass func()) (*bench, *slow) {
	b := newBench(t, rule.Rule{Key: "user/*", Share: tokenbucket.Share{Rate: 1, Burst: 5}})
	s := &slow{server.NewStore(b.store), pass, atomic.Int64{}}
	b.cfg.Store = server.NewStore(s)
	return b, s
}

func asker(t *testing.T, wait time.Duration, address string) *client.Client {
	t.Helper()
	c := testkit.Result(client.New(client.Config{Servers: []string{address}, Attempts: 100, Wait: wait})).Must(t)
	t.Cleanup(c.Close)
	return c
}

// The first question of a key waits for the store, even for longer than all attempts at a server that
// gives no sign of life.
func TestADecisionWaitsForTheStore(t *testing.T) {
	pass := make(chan struct{})
	b, _ := slowBench(t, func() { <-pass })
	registry := prometheus.NewRegistry()
	b.cfg.Metrics = registry
	s, _ := b.start()
	c := asker(t, testkit.Hang, s.Addr().String())
	for i := range 5 {
		copies := func() float64 { return testkit.Metric(t, registry, "srtm_admission_datagrams_total", "again") }
		before := copies()
		decided := make(chan client.Decision)
		go func() { decided <- c.Ask(t.Context(), fmt.Sprint("user/", i), 1) }()
		testkit.WaitFor(t, "copies of the question", func() bool { return copies() > before+float64(client.DefaultAttempts) })
		pass <- struct{}{}
		if d := <-decided; !d.Admit || d.Unanswered || d.Left != 4 {
			t.Errorf("key %d: %+v", i, d)
		}
	}
}

// However many clients ask for a key at once, each waits for the store.
func TestManyWaitForAKey(t *testing.T) {
	const questions = 300
	began := make(chan struct{})
	b, _ := slowBench(t, func() { <-began })
	b.set(rule.Rule{Key: "hot", Share: tokenbucket.Share{Rate: 1, Burst: questions}})
	registry := prometheus.NewRegistry()
	b.cfg.Metrics = registry
	s, _ := b.start()
	c := asker(t, testkit.Hang, s.Addr().String())
	var asking sync.WaitGroup
	var admitted atomic.Int64
	for range questions {
		asking.Go(func() {
			if d := c.Ask(t.Context(), "hot", 1); d.Admit && !d.Unanswered {
				admitted.Add(1)
			}
		})
	}
	testkit.WaitFor(t, "more questions than wait in the server", func() bool { return testkit.Metric(t, registry, "srtm_admission_datagrams_total", "waiting") > 100 })
	close(began)
	asking.Wait()
	testkit.Equal(t, admitted.Load(), questions, "admitted of %d", questions)
	testkit.Equal(t, sure(t, b.client(s), "hot", 0).Left, 0, "left")
}

// If the client has denied a question when the store answers, the question takes nothing. The server
// knows from the wait that the question states.
func TestALateDecisionTakesNothing(t *testing.T) {
	began, asked := make(chan struct{}), make(chan struct{}, 10)
	b, _ := slowBench(t, func() { asked <- struct{}{}; <-began })
	s, _ := b.start()
	c := asker(t, 20*time.Millisecond, lossy(t, s.Addr().String(), true))
	if d := c.Ask(t.Context(), "user/1", 1); d.Admit || !d.Unanswered {
		t.Fatalf("%+v", d)
	}
	<-asked
	b.clock.pass(21 * time.Millisecond)
	close(began)
	testkit.Equal(t, sure(t, b.client(s), "user/1", 0).Left, 5, "left after a denial")
}

// The server's bound holds for clients that would wait longer.
func TestTheServersBound(t *testing.T) {
	began, asked := make(chan struct{}), make(chan struct{}, 10)
	b, _ := slowBench(t, func() { asked <- struct{}{}; <-began })
	b.cfg.Lookup = 30 * time.Second
	s, _ := b.start()
	c := b.client(s)
	decided := make(chan client.Decision)
	go func() { decided <- c.Ask(t.Context(), "user/1", 1) }()
	<-asked
	b.clock.pass(31 * time.Second)
	close(began)
	// The first copy was given up, and a later copy is decided.
	if d := <-decided; !d.Admit || d.Left != 4 {
		t.Errorf("%+v", d)
	}
}

// lossy passes questions on to a server, and loses all answers but sessions. With noCancel it also
// loses cancels.
func lossy(t *testing.T, to string, noCancel bool) string {
	t.Helper()
	front := testkit.Result(net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})).Must(t)
	back := testkit.Result(net.Dial("udp", to)).Must(t)
	var asker atomic.Value
	var running sync.WaitGroup
	t.Cleanup(func() { front.Close(); back.Close(); running.Wait() })
	running.Go(func() {
		var in [1000]byte
		for {
			n, from, err := front.ReadFromUDPAddrPort(in[:])
			if err != nil {
				return
			}
			asker.Store(from)
			if kind := in[2]; kind != byte(wire.Cancel) || !noCancel {
				back.Write(in[:n])
			}
		}
	})
	running.Go(func() {
		var in [1000]byte
		for {
			n, err := back.Read(in[:])
			if err != nil {
				return
			}
			if kind := in[2]; kind == byte(wire.Issued) {
				front.WriteToUDPAddrPort(in[:n], asker.Load().(netip.AddrPort))
			}
		}
	})
	return front.LocalAddr().String()
}

// A client whose answers are lost gets its charge back, however often the client sent the question.
func TestADenialTakesNothing(t *testing.T) {
	b, _ := slowBench(t, func() {})
	s, _ := b.start()
	testkit.Equal(t, sure(t, b.client(s), "user/1", 0).Left, 5, "left at first")
	c := asker(t, testkit.Hang, lossy(t, s.Addr().String(), false))
	for range 20 {
		if d := c.Ask(t.Context(), "user/1", 2); d.Admit || !d.Unanswered {
			t.Fatalf("%+v", d)
		}
	}
	other := b.client(s)
	testkit.WaitFor(t, "all to be given back", func() bool { return sure(t, other, "user/1", 0).Left == 5 })
	// The default reply admitted the question, so the question stays charged.
	if d := c.AskOr(t.Context(), "user/1", 2, func(string) bool { return true }); !d.Admit || !d.Unanswered {
		t.Fatalf("%+v", d)
	}
	testkit.WaitFor(t, "the charge", func() bool { return sure(t, other, "user/1", 0).Left == 3 })
}

// broken is a store whose lookups of keys fail.
type broken struct{ server.Store }

func (broken) RulesOf(context.Context, []string) (map[string]rule.Rule, error) {
	return nil, errors.New("the database system is shutting down")
}

// However many lookups fail, the log reports the failure only once in a while.
func TestOneCauseIsOneLine(t *testing.T) {
	const keys = 200
	b, _ := slowBench(t, func() {})
	var log testkit.Buffer
	registry := prometheus.NewRegistry()
	b.cfg.Store, b.cfg.Log, b.cfg.Metrics = server.NewStore(broken{server.NewStore(b.store)}), slog.New(slog.NewTextHandler(&log, nil)), registry
	s, _ := b.start()
	c := testkit.Result(client.New(client.Config{Servers: []string{s.Addr().String()}})).Must(t)
	defer c.Close()
	for i := range keys {
		if d := c.Ask(t.Context(), fmt.Sprint("user/", i), 1); d.Admit || !d.Unanswered {
			t.Fatalf("%+v", d)
		}
	}
	testkit.WaitFor(t, "failures", func() bool { return testkit.Metric(t, registry, "srtm_admission_lookup_errors_total") >= keys })
	// Each line after the first says how long the outage has lasted: 10 s more than the line before.
	durations := regexp.MustCompile(`keys could not be looked up.*?(?: duration=(\S+))?\n`).FindAllStringSubmatch(log.String(), -1)
	if len(durations) == 0 {
		t.Errorf("no line:\n%s", log.String())
	}
	for i, line := range durations {
		if lasted, _ := time.ParseDuration(line[1]); lasted < time.Duration(i)*10*time.Second {
			t.Errorf("line %d after %v:\n%s", i+1, lasted, log.String())
		}
	}
}
