package search

import (
	"math"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
)

func draw(t *rapid.T) Config {
	least := rapid.Int64Range(1, 1000).Draw(t, "least")
	first := rapid.Int64Range(least, 20*least).Draw(t, "first")
	return Config{
		Least: least, First: first, Most: rapid.Int64Range(first, 1_000_000).Draw(t, "most"),
		Tolerance: rapid.Float64Range(0.005, 0.5).Draw(t, "tolerance"), Steps: 1000, Again: rapid.IntRange(0, 2).Draw(t, "again"),
	}
}

// The search finds any limit, of the broker or of the generator.
func TestTheLimitIsFound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := draw(t)
		testkit.Must(t, cfg.Validate())
		limit := rapid.Int64Range(0, 2*cfg.Most).Draw(t, "limit")
		why := rapid.SampledFrom([]Outcome{Missed, Unoffered}).Draw(t, "why")
		s := New(cfg)
		tried := 0
		for {
			rate, more := s.Next()
			if !more {
				break
			}
			if rate < cfg.Least || rate > cfg.Most {
				t.Fatalf("tries %d of %d to %d", rate, cfg.Least, cfg.Most)
			}
			if tried++; rate <= limit {
				s.Record(rate, Kept)
			} else {
				s.Record(rate, why)
			}
		}
		kept, sure := s.Kept()
		over, what := s.Over()
		switch {
		case limit < cfg.Least:
			if kept != 0 || over != cfg.Least {
				t.Fatalf("kept %d, over %d, and nothing is kept", kept, over)
			}
		case limit >= cfg.Most:
			if kept != cfg.Most || !sure || over != 0 || what != Untried {
				t.Fatalf("kept %d, sure %v, over %d, and everything is kept", kept, sure, over)
			}
		default:
			if kept > limit || over <= limit || !sure || what != why || over-kept > max(1, int64(cfg.Tolerance*float64(over))) {
				t.Fatalf("kept %d, sure %v, over %d (%v), of a limit of %d (%v)", kept, sure, over, what, limit, why)
			}
		}
		doublings := math.Log2(float64(cfg.Most)) + 2
		if halves := math.Log2(1/cfg.Tolerance) + 2; float64(tried) > (doublings+halves)*float64(1+cfg.Again) {
			t.Fatalf("%d steps, %v doublings and %v halves are enough", tried, doublings, halves)
		}
	})
}

// For any outcomes, even if the same rate is kept and then missed, the search ends, never tries a rate above a missed
// rate, and never returns a rate that a later step disproved.
func TestAnyOutcomes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := draw(t)
		cfg.Steps = rapid.IntRange(1, 60).Draw(t, "steps")
		s := New(cfg)
		kept := map[int64]int{}
		var least int64 = math.MaxInt64
		steps, late := 0, 0
		for {
			rate, more := s.Next()
			if !more {
				break
			}
			if steps++; steps > cfg.Steps {
				t.Fatalf("more than %d steps", cfg.Steps)
			}
			if rate >= least {
				t.Fatalf("tries %d, and %d was not kept", rate, least)
			}
			o := rapid.SampledFrom([]Outcome{Kept, Kept, Missed, Unoffered}).Draw(t, "outcome")
			s.Record(rate, o)
			switch {
			case o == Unoffered && late < cfg.Again:
				late++ // the search tries the rate again
				continue
			case o == Kept:
				kept[rate]++
			default:
				least = rate
			}
			late = 0
		}
		rate, sure := s.Kept()
		switch {
		case rate == 0 && sure:
			t.Fatal("sure of nothing")
		case rate != 0 && (rate >= least || kept[rate] < 1 || sure && kept[rate] < 2):
			t.Fatalf("kept %d, sure %v: it was kept %d times, and %d was not", rate, sure, kept[rate], least)
		}
		if over, _ := s.Over(); over != 0 && over != least {
			t.Fatalf("over %d, want %d", over, least)
		}
	})
}

// A rate that was kept by luck is missed in the second trial, and the search finds a lower rate.
func TestLuckIsTakenBack(t *testing.T) {
	s := New(Config{First: 100, Least: 1, Most: 1000, Tolerance: 0.1, Steps: 20})
	var tried []int64
	for n := 0; ; n++ {
		rate, more := s.Next()
		if !more {
			break
		}
		tried = append(tried, rate)
		switch {
		case rate <= 150, rate < 200 && n < 5:
			s.Record(rate, Kept)
		default:
			s.Record(rate, Missed)
		}
	}
	if rate, sure := s.Kept(); !sure || rate > 150 || rate < 135 {
		t.Errorf("kept %d, sure %v, tried %v", rate, sure, tried)
	}
}

func TestConfigFaults(t *testing.T) {
	good := Config{First: 10, Least: 1, Most: 10, Tolerance: 0.1, Steps: 1}
	testkit.NoError(t, good.Validate())
	for _, part := range []string{"least 0, first 20, most 10", "tolerance NaN", "0 steps, again 0 times"} {
		err := Config{First: 20, Most: 10, Tolerance: math.NaN()}.Validate()
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%v does not say %q", err, part)
		}
	}
}

func TestJudge(t *testing.T) {
	slo := SLO{Quantile: 0.99, Latency: 10 * time.Millisecond}
	testkit.Equal(t, slo.MinDeliveries(), 1000, "deliveries to judge 0.99")
	if o, _ := (SLO{0.9, time.Second}).Judge(Evidence{Delivered: 1000, Exceeded: 100}); o != Kept {
		t.Errorf("a tenth may be late: %v", o)
	}
	good := Evidence{Late: time.Millisecond, Delivered: 2000, Exceeded: 20}
	for name, c := range map[string]struct {
		change func(*Evidence)
		want   Outcome
		why    string
	}{
		"kept":                              {func(*Evidence) {}, Kept, ""},
		"one too many":                      {func(e *Evidence) { e.Exceeded++ }, Missed, "21 of 2000 deliveries took more than 10ms"},
		"late":                              {func(e *Evidence) { e.Late = 5001 * time.Microsecond }, Unoffered, "up to 5.001ms late"},
		"late, and the SLO missed":          {func(e *Evidence) { e.Late, e.Exceeded = time.Second, 1000 }, Unoffered, "up to 1s late"},
		"late, for the broker took no more": {func(e *Evidence) { e.Late, e.Held = time.Second, 7 }, Missed, "did not take 7"},
		"refused":                           {func(e *Evidence) { e.Refused = 3 }, Missed, "3 messages refused"},
		"cut off":                           {func(e *Evidence) { e.Lost, e.Unanswered = 1, 5 }, Missed, "lost 1 connection"},
		"no answer":                         {func(e *Evidence) { e.Unanswered = 5 }, Missed, "5 messages not answered"},
		"lost":                              {func(e *Evidence) { e.Undelivered = 1 }, Missed, "1 message not delivered"},
		"too few":                           {func(e *Evidence) { e.Delivered, e.Exceeded = 999, 0 }, Unoffered, "too few"},
	} {
		e := good
		c.change(&e)
		if got, why := slo.Judge(e); got != c.want || !strings.Contains(why, c.why) || (why == "") != (got == Kept) {
			t.Errorf("%s: %v, %q", name, got, why)
		}
	}
}

// A generator that was late only once is not the limit.
func TestWhatWasNotOfferedIsTriedAgain(t *testing.T) {
	s := New(Config{First: 100, Least: 1, Most: 200, Tolerance: 0.1, Steps: 20, Again: 2})
	for _, c := range []struct {
		rate int64
		o    Outcome
	}{{100, Unoffered}, {100, Unoffered}, {100, Kept}, {200, Unoffered}, {200, Kept}, {200, Kept}} {
		if rate, more := s.Next(); rate != c.rate || !more {
			t.Fatalf("tries %d, %v, want %d", rate, more, c.rate)
		}
		s.Record(c.rate, c.o)
	}
	if rate, sure := s.Kept(); rate != 200 || !sure {
		t.Errorf("kept %d, sure %v", rate, sure)
	}
	if rate, more := s.Next(); more {
		t.Errorf("continues with %d", rate)
	}
}
