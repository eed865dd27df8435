package calibrate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tools/srtm/calibrate/search"
)

// nsqdBinary is set once, by TestMain.
var nsqdBinary string

type suite struct{ m *testing.M }

func TestMain(m *testing.M) { testkit.Main(&suite{m}) }

func (s *suite) Run() int {
	dir, err := os.MkdirTemp("", "calibrate")
	if err != nil {
		fmt.Fprintln(os.Stderr, "calibrate:", err)
		return 1
	}
	defer os.RemoveAll(dir)
	nsqdBinary = filepath.Join(dir, "nsqd")
	if err := local.Build(context.Background(), "github.com/srtm-io/srtm/nsqd", nsqdBinary); err != nil {
		fmt.Fprintln(os.Stderr, "calibrate:", err)
		return 1
	}
	return s.m.Run()
}

// nsqd starts a real broker for the time of the test. It returns a calibration of the broker that takes seconds and that
// any machine can carry.
func nsqd(t *testing.T, flags ...string) Config {
	t.Helper()
	at := testkit.Result(local.Ports(2)).Must(t)
	d, err := local.NSQDAt(nsqdBinary, t.TempDir(), at[0], at[1], append(flags, "--broker-id=b1")...)
	testkit.Must(t, err)
	t.Cleanup(func() {
		if err := d.Stop(); err != nil {
			t.Errorf("%v\n%s", err, d.Output())
		}
	})
	return Config{
		TCP: at[0], HTTP: at[1], SLO: search.SLO{Quantile: 0.9, Latency: 10 * time.Second},
		Search:      search.Config{First: 200, Least: 100, Most: 400, Tolerance: 0.1, Steps: 10, Again: 2},
		Connections: 5, Size: 100, Settle: 100 * time.Millisecond, Step: 600 * time.Millisecond, Limit: time.Minute,
		Workers: 1, Seed: 1, Logger: slog.New(slog.DiscardHandler),
	}
}

// topicsOf returns the names of the broker's topics.
func topicsOf(t *testing.T, cfg Config) []string {
	t.Helper()
	all := testkit.Result(broker{address: cfg.HTTP}.topics(t.Context())).Must(t)
	names := []string{}
	for _, topic := range all {
		names = append(names, topic.Name)
	}
	return names
}

func post(t *testing.T, cfg Config, path string) {
	t.Helper()
	_, err := (broker{address: cfg.HTTP}).ask(t.Context(), http.MethodPost, path)
	testkit.NoError(t, err)
}

func TestABrokerThatCarriesMoreThanIsTried(t *testing.T) {
	cfg := nsqd(t)
	testkit.Must(t, cfg.Validate())
	var told []Step
	r := testkit.Result(Run(t.Context(), cfg, func(s Step) { told = append(told, s) })).Must(t)
	if r.Mcap != 400 || r.Over != 0 || r.Limit != LimitMost || !r.Known() || !slices.Equal(told, r.Steps) {
		t.Errorf("%+v", r)
	}
	for _, s := range r.Steps {
		// A tenth of the messages of 0.6 s is more than ten standard deviations.
		if s.Outcome == search.Kept && (s.Exceeded != 0 || s.Why != "" || s.Delay <= 0 ||
			s.Offered < 0.5*float64(s.Rate) || s.Offered > 1.5*float64(s.Rate) || float64(s.Delivered) < 0.3*float64(s.Rate)) {
			t.Errorf("%+v", s)
		}
	}
	if left := topicsOf(t, cfg); len(left) > 0 {
		t.Errorf("it leaves %v", left)
	}
	testkit.Result(Identity(t.Context(), cfg.HTTP, nil)).Equal(t, "b1", "its id")
}

// A broker that ends connections misses every rate. The calibration does not blame the generator, and leaves nothing
// behind.
func TestABrokerThatKeepsNothing(t *testing.T) {
	cfg := nsqd(t, "--max-msg-size=50")
	cfg.Search.First = cfg.Search.Least
	r, err := Run(t.Context(), cfg, func(Step) {})
	if !errors.Is(err, ErrNothingKept) || r.Mcap != 0 || r.Over != 100 || r.Limit != LimitBroker || r.Known() || len(r.Steps) != 1 {
		t.Fatalf("%+v, %v", r, err)
	}
	for _, s := range r.Steps {
		if s.Outcome != search.Missed || !strings.Contains(s.Why, "lost ") {
			t.Errorf("%+v", s)
		}
	}
	if left := topicsOf(t, cfg); len(left) > 0 {
		t.Errorf("it leaves %v", left)
	}
}

func TestABrokerThatCarriesTopics(t *testing.T) {
	cfg := nsqd(t)
	var steps []Step
	keep := func(s Step) { steps = append(steps, s) }
	// A topic that is created meanwhile ends the calibration.
	_, err := Run(t.Context(), cfg, func(s Step) {
		keep(s)
		post(t, cfg, "/topic/create?topic=theirs")
	})
	var carries *CarriesError
	if !errors.As(err, &carries) || !slices.Equal(carries.Topics, []string{"theirs"}) || len(steps) != 1 {
		t.Errorf("%v after %d steps", err, len(steps))
	}
	testkit.EqualSlices(t, topicsOf(t, cfg), []string{"theirs"}, "it leaves")

	steps = nil
	if _, err := Run(t.Context(), cfg, keep); !errors.As(err, &carries) || len(steps) != 0 {
		t.Errorf("%v after %d steps", err, len(steps))
	}
	cfg.Force, cfg.Search.First = true, 400
	if r, err := Run(t.Context(), cfg, keep); err != nil || r.Mcap != 400 {
		t.Errorf("forced: %+v, %v", r, err)
	}
	testkit.EqualSlices(t, topicsOf(t, cfg), []string{"theirs"}, "it leaves")
}

// An interrupt at any time leaves nothing behind.
func TestAnInterrupt(t *testing.T) {
	cfg := nsqd(t)
	cfg.Step, cfg.Limit = time.Minute, time.Hour
	stop := errors.New("interrupted")
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	done := make(chan error, 1)
	go func() {
		_, err := Run(ctx, cfg, func(Step) {})
		done <- err
	}()
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	for len(topicsOf(t, cfg)) == 0 {
		select {
		case <-ticker.C:
		case err := <-done:
			t.Fatalf("it ended before: %v", err)
		}
	}
	cancel(stop)
	testkit.ErrorIs(t, <-done, stop)
	if left := topicsOf(t, cfg); len(left) > 0 {
		t.Errorf("it leaves %v", left)
	}
}

// A search without time left reports the lack of time and returns no result.
func TestNoTimeLeft(t *testing.T) {
	cfg := nsqd(t)
	cfg.Limit = cfg.Settle + cfg.Step + drainTimeout + 500*time.Millisecond
	r, err := Run(t.Context(), cfg, func(Step) {})
	if err != nil || r.Limit != LimitTime || r.Known() || r.Mcap != 200 || len(r.Steps) != 1 {
		t.Errorf("%+v, %v", r, err)
	}
	cfg.Limit = cfg.Settle + cfg.Step
	if r, err := Run(t.Context(), cfg, func(Step) {}); !errors.Is(err, ErrNoTime) || r.Limit != LimitTime || len(r.Steps) != 0 {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestConfigFaults(t *testing.T) {
	err := Config{TCP: "x", HTTP: ":", Search: search.Config{First: 1, Least: 1, Most: 1, Tolerance: 0.1, Steps: 1}}.Validate()
	for _, part := range []string{`address "x"`, "quantile 0", "--slo-latency: 0s", "settling for 0s", "steps of 0s", "0 workers"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%v does not say %q", err, part)
		}
	}
	few := Config{
		TCP: "h:1", HTTP: "h:2", SLO: search.SLO{Quantile: 0.999, Latency: time.Second}, Connections: 1, Size: 10,
		Search: search.Config{First: 100, Least: 99, Most: 100, Tolerance: 0.1, Steps: 1}, Settle: time.Second, Step: 10 * time.Second, Limit: time.Minute, Workers: 1,
	}
	testkit.ErrorHas(t, few.Validate(), "99 msg/s in 1m40s are too few messages for the SLO's quantile: want 100 msg/s or more")
	if few.Search.Least = 100; few.Validate() != nil {
		t.Error(few.Validate())
	}
	testkit.Equal(t, few.measured(100), 100*time.Second, "100 msg/s are measured for")
	testkit.Equal(t, few.measured(100_000), 10*time.Second, "100,000 msg/s are measured for")
}

func latency(samples ...time.Duration) *histogram.Latency {
	l := histogram.NewLatency()
	for _, s := range samples {
		l.Record(s)
	}
	return l
}

func TestSince(t *testing.T) {
	before := latency(time.Millisecond, time.Millisecond, time.Second)
	after := latency(time.Millisecond, time.Millisecond, time.Second, time.Second, time.Minute)
	l, err := since(before, after)
	if err != nil || l.Count() != 2 || l.CountAbove(500*time.Millisecond) != 2 || l.CountAbove(30*time.Second) != 1 {
		t.Errorf("%v, %v", obs.LatencyProto(l), err)
	}
	for _, less := range []*histogram.Latency{latency(), latency(time.Millisecond, time.Second, time.Minute)} {
		if _, err := since(before, less); err == nil {
			t.Error("counts went down")
		}
	}
}

func FuzzParseStats(f *testing.F) {
	p := obs.LatencyProto(latency(time.Millisecond, time.Second))
	index, _ := json.Marshal(p.Index)
	f.Add(fmt.Appendf(nil, `{"topics":[{"topic_name":"t","srtm":{"latency":{"delivery_histogram":{"lowest_us":1,"highest_us":60000000,"significant_digits":2,"index":%s,"count":[1,1]}}}}]}`, index))
	f.Add([]byte(`{"topics":[{"topic_name":"t"}]}`))
	f.Add([]byte(`{`))
	f.Fuzz(func(t *testing.T, text []byte) {
		all, err := parseStats(text)
		if err != nil && all != nil {
			t.Fatal("stats and an error")
		}
		for _, topic := range all {
			if l, err := since(topic.Delivery, topic.Delivery); err != nil || l.Count() != 0 {
				t.Fatalf("%v, %v", l, err)
			}
		}
	})
}
