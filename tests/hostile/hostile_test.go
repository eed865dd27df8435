package hostile

import (
	"cmp"
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

const (
	// slice is the duration of a quiet slice and of an attack slice, alternations their number.
	slice        = 250 * time.Millisecond
	alternations = 5
	// worst is the maximum p99 under attack in multiples of the quiet p99, unless the attack has its
	// own. A quiet p99 counts as at least floor: below floor the kernel's work dominates, which shares
	// the processors among the broker, the attacker and the others.
	worst = 5
	floor = time.Millisecond
	// tries bounds how often the test takes further slices, because other processes on the machine may
	// have spoiled the earlier slices.
	tries = 5
)

func TestMain(m *testing.M) { localtest.Main(m) }

// given is an nsqd to attack instead of ours, or "".
func given() string {
	path := os.Getenv("SRTM_HOSTILE_NSQD")
	if abs, err := filepath.Abs(path); path != "" && err == nil {
		return abs // the nsqd runs in its own folder
	}
	return path
}

// attack is what a client, or a few clients, do to a broker.
type attack struct {
	name  string
	flags []string // of the nsqd

	// prepare prepares the broker; nil: nothing to prepare.
	prepare func(b *broker) error
	// strike is called repeatedly, at most once in every, as long as the attack lasts. It ends with
	// ctx, or earlier. A refusal by the broker, or a cut connection, is no error.
	strike func(ctx context.Context, b *broker) error
	every  time.Duration
	worst  float64 // 0: the constant worst
	// check checks the broker's counters after the attack, before the broker is stopped; nil: the
	// others' latency is enough.
	check func(b *broker) error
}

// Each attack alone: the others do not notice it.
func TestOthersAreNotHurt(t *testing.T) { judge(t, attacks, false) }

// The attacks of MQTT clients. One pair of the others speaks NSQ, and one pair speaks MQTT.
func TestOthersAreNotHurtByMQTT(t *testing.T) { judge(t, mqttAttacks, true) }

func judge(t *testing.T, attacks []attack, mqtt bool) {
	for _, a := range attacks {
		t.Run(a.name, func(t *testing.T) {
			b := start(t, given(), mqtt, a.flags...)
			o := meet(t, b)
			if a.prepare != nil {
				testkit.Must(t, a.prepare(b))
			}
			limit := cmp.Or(a.worst, worst)
			var quiet, loud []time.Duration
			for try := 1; ; try++ {
				a.measure(t, b, o, &quiet, &loud)
				slices.Sort(quiet)
				q, l := quiet[len(quiet)/2], slices.Min(loud)
				ratio := float64(l) / float64(max(q, floor))
				t.Logf("p99 quiet %v, the median of %v; attacked %v, the least of %v: %.1f times", q, quiet, l, loud, ratio)
				if ratio <= limit {
					break
				}
				if try == tries {
					t.Fatalf("the others' p99 is %.1f times the quiet one, and may be %g times", ratio, limit)
				}
			}
			slow, err := b.metric("srtm_nsqd_loop_slow_turns_total")
			t.Logf("parts of turns longer than 5 ms, the machine's own included: %.0f %v", slow, err)
			if a.check != nil {
				testkit.NoError(t, a.check(b))
			}
		})
	}
}

// measure alternates quiet slices with slices of the attack, and adds their p99s. The test compares
// the least p99 under attack with the median quiet p99. Other load on the machine comes and goes, while an
// attack hurts in every slice. If other programs keep the processors busy, a single quiet slice without them
// must not decide: the attack's slices had the other programs.
func (a *attack) measure(t *testing.T, b *broker, o *others, quiet, loud *[]time.Duration) {
	t.Helper()
	for range alternations {
		testkit.WaitFor(t, "the attacker's connections are gone", func() bool {
			n := testkit.Result(b.metric("srtm_nsqd_connections")).Must(t)
			return int(n) <= o.connections()
		})
		*quiet = append(*quiet, p99(o.measure(t, slice)))
		ctx, cancel := context.WithTimeout(t.Context(), slice)
		var wg sync.WaitGroup
		wg.Go(func() { a.run(ctx, t, b) })
		*loud = append(*loud, p99(o.measure(t, slice)))
		cancel()
		wg.Wait()
	}
}

// run strikes until ctx ends.
func (a *attack) run(ctx context.Context, t *testing.T, b *broker) {
	tick := time.NewTicker(a.every)
	defer tick.Stop()
	for ctx.Err() == nil {
		if err := a.strike(ctx, b); err != nil && ctx.Err() == nil {
			t.Errorf("%s: %v", a.name, err)
			return
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
}

// All attacks at once, on a broker with the race detector. A race shows in the broker's exit code.
// Attacks that need other flags have another broker.
func TestNoDataRaces(t *testing.T) { all(t, attacks, false) }

func TestNoDataRacesOfMQTT(t *testing.T) { all(t, mqttAttacks, true) }

func all(t *testing.T, attacks []attack, mqtt bool) {
	if given() != "" {
		t.Skip("the binary was given")
	}
	const duration = 1500 * time.Millisecond
	alike := map[string][]attack{}
	for _, a := range attacks {
		key := strings.Join(a.flags, " ")
		alike[key] = append(alike[key], a)
	}
	for key, some := range alike {
		t.Run(key, func(t *testing.T) {
			b := start(t, localtest.Racing(t, "nsqd"), mqtt, some[0].flags...)
			o := meet(t, b)
			for _, a := range some {
				if a.prepare != nil {
					testkit.Must(t, a.prepare(b))
				}
			}
			ctx, cancel := context.WithTimeout(t.Context(), duration)
			defer cancel()
			var wg sync.WaitGroup
			for _, a := range some {
				wg.Go(func() { a.run(ctx, t, b) })
			}
			o.measure(t, duration)
			wg.Wait()
		})
	}
}

func p99(all []time.Duration) time.Duration {
	slices.Sort(all)
	return all[len(all)*99/100]
}
