package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestMain(m *testing.M) {
	if name := os.Getenv(daemonEnv); name != "" {
		os.Exit(daemons[name]())
	}
	testkit.Main(m)
}

// pass lets d of virtual time pass.
func pass(d time.Duration) { <-time.After(d) }

// journal collects events in order.
type journal struct {
	mu    sync.Mutex
	lines []string
}

func (j *journal) add(format string, args ...any) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.lines = append(j.lines, fmt.Sprintf(format, args...))
}

func (j *journal) expect(t *testing.T, want ...string) {
	t.Helper()
	j.mu.Lock()
	defer j.mu.Unlock()
	if !slices.Equal(j.lines, want) {
		t.Errorf("happened:\n  %q\nwant:\n  %q", j.lines, want)
	}
}

// slow returns a part that takes d to stop and records the order of events.
func (j *journal) slow(name string, d time.Duration) func(context.Context) error {
	return func(ctx context.Context) error {
		<-ctx.Done()
		j.add("%s stopping", name)
		pass(d)
		j.add("%s gone", name)
		return ctx.Err()
	}
}

func TestPartsStopInReverseOrderEachWaitedFor(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		var (
			g Group
			j journal
		)
		g.Add("a", j.slow("a", time.Second))
		g.Add("b", j.slow("b", time.Minute))
		g.Add("c", j.slow("c", time.Second))
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Hour, cancel)
		if err := g.Run(ctx); err != nil {
			t.Errorf("a clean stop: %v", err)
		}
		j.expect(t, "c stopping", "c gone", "b stopping", "b gone", "a stopping", "a gone")
	})
}

func TestAnErrorStopsAllAndComesFirst(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		var (
			g       Group
			j       journal
			broken  = errors.New("broken")
			closing = errors.New("cannot close")
		)
		g.Add("disk", func(ctx context.Context) error {
			<-ctx.Done()
			return errors.Join(ctx.Err(), closing)
		})
		g.Add("engine", func(context.Context) error {
			pass(time.Second)
			return broken
		})
		g.Add("wheels", j.slow("wheels", time.Second))
		err := g.Run(t.Context())
		if !errors.Is(err, broken) || !errors.Is(err, closing) {
			t.Fatalf("%v; want both causes", err)
		}
		if want := "engine: broken\ndisk: context canceled\ncannot close"; err.Error() != want {
			t.Errorf("%q, want %q", err, want)
		}
		j.expect(t, "wheels stopping", "wheels gone")
	})
}

func TestAPartMayFinishEarly(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		var (
			g Group
			j journal
		)
		g.Add("warm-up", func(context.Context) error { j.add("warmed"); return nil })
		g.Add("server", j.slow("server", 0))
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Hour, func() { j.add("signal"); cancel() })
		testkit.NoError(t, g.Run(ctx))
		j.expect(t, "warmed", "signal", "server stopping", "server gone")
	})
}

func TestRunEndsWhenAllHaveFinished(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		var g Group
		for i := range 3 {
			g.Add(fmt.Sprint(i), func(context.Context) error { pass(time.Duration(i) * time.Second); return nil })
		}
		start := time.Now()
		testkit.NoError(t, g.Run(t.Context()))
		if took := time.Since(start); took != 2*time.Second {
			t.Errorf("ended after %v, want 2s: when the last one had", took)
		}
	})
}

func TestAnEmptyGroupEndsAtOnce(t *testing.T) {
	testkit.NoError(t, new(Group).Run(t.Context()))
}

// A part that returns context.Canceled without a request to stop has failed, because another context
// ended under the part.
func TestCanceledWithoutBeingToldIsAnError(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		var g Group
		g.Add("confused", func(context.Context) error { return fmt.Errorf("dial: %w", context.Canceled) })
		g.Add("fine", func(ctx context.Context) error { <-ctx.Done(); return nil })
		if err := g.Run(t.Context()); !errors.Is(err, context.Canceled) {
			t.Errorf("%v, want it reported", err)
		}
	})
}

func TestContextsKeepTheirValues(t *testing.T) {
	type key struct{}
	var g Group
	g.Add("reader", func(ctx context.Context) error {
		if ctx.Value(key{}) != "here" {
			return errors.New("value lost")
		}
		return nil
	})
	testkit.NoError(t, g.Run(context.WithValue(t.Context(), key{}, "here")))
}

func TestOnlyCanceled(t *testing.T) {
	other := errors.New("other")
	for _, c := range []struct {
		err  error
		want bool
	}{
		{context.Canceled, true},
		{fmt.Errorf("a: %w", context.Canceled), true},
		{errors.Join(context.Canceled, fmt.Errorf("b: %w", context.Canceled)), true},
		{context.DeadlineExceeded, false},
		{other, false},
		{errors.Join(context.Canceled, other), false},
		{fmt.Errorf("%w, %w", other, context.Canceled), false},
	} {
		testkit.Equal(t, onlyCanceled(c.err), c.want, "%q", c.err)
	}
}
