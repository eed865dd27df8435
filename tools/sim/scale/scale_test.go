package scale

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tbadaptor/share"
)

func config() Config {
	return Config{
		Size: Size{Brokers: 10, Topics: 40, Publishers: 4000}, Policy: placement.SRTM, Rule: share.Proportional,
		Mcap: 10_000, Load: 0.8, GroupSize: 25, Ticks: 3, Seed: 1,
	}
}

// counting is a meter whose clock counts how often it is read, and whose heap
// shrinks by a byte each time.
func counting() (Meter, *[]string) {
	now, heap := mono.Time(0), uint64(1000)
	var told []string
	return Meter{
		Now:      func() mono.Time { now += mono.Time(time.Microsecond); return now },
		Heap:     func() uint64 { heap--; return heap },
		Progress: func(stage string, done, total int) { told = append(told, fmt.Sprintf("%s %d/%d", stage, done, total)) },
	}, &told
}

func TestAStudyCountsWhatItDid(t *testing.T) {
	meter, told := counting()
	cfg := config()
	r := testkit.Result(Run(cfg, meter)).Must(t)
	for step, times := range map[string]Times{"place": r.Place, "commit": r.Commit, "grant": r.Grant} {
		if times.Count != cfg.Topics || times.P50 != time.Microsecond || times.Total != time.Duration(cfg.Topics)*time.Microsecond {
			t.Errorf("%s: %+v, want a reading of the clock for each of %d topics", step, times, cfg.Topics)
		}
	}
	if r.Tick.Count != 3 || r.Resolve.Count != 1000 || r.Rejoin.Count != 5 {
		t.Errorf("%d ticks, %d resolved, %d came back", r.Tick.Count, r.Resolve.Count, r.Rejoin.Count)
	}
	// The largest topic has a quarter of the load of 10 brokers: it is split.
	if r.Split < 1 || r.Widest < 2 || r.Largest < 900 {
		t.Errorf("%d topics split, the widest over %d, the largest of %d publishers", r.Split, r.Widest, r.Largest)
	}
	// Every period of the adaptor takes two readings for each split topic.
	testkit.Equal(t, r.Tick.Max, time.Duration(r.Split)*time.Microsecond, "a tick read")
	m := r.Messages
	// A topic on one broker: the call and its stream 4, prepare 2, contract 2, grant 2.
	if m.PerTopic < 10 || m.ReportsPerSecond != 20 || m.GrantsPerSecond <= 0 || m.PerSecond() != 20+m.GrantsPerSecond {
		t.Errorf("messages %+v", m)
	}
	if minimum := float64(2 * (cfg.Topics + r.Split)); m.EntriesPerSecond < minimum {
		t.Errorf("%v lines a second in reports, want at minimum %v", m.EntriesPerSecond, minimum)
	}
	if !slices.Contains(*told, "placing topics 0/40") || !slices.Contains(*told, "retuning shares 2/3") {
		t.Errorf("progress %v", *told)
	}
}

func TestTheSameSeedGivesTheSameReport(t *testing.T) {
	for _, policy := range placement.Policies() {
		cfg := config()
		cfg.Policy = policy
		report := func(seed uint64) Report {
			cfg.Seed = seed
			meter, _ := counting()
			r, err := Run(cfg, meter)
			if err != nil {
				t.Fatalf("%s: %v", policy, err)
			}
			return r
		}
		if a, b := report(3), report(3); a != b {
			t.Errorf("%s: one seed gave\n%+v\n%+v", policy, a, b)
		}
		if a, b := report(3), report(4); a == b {
			t.Errorf("%s: seeds 3 and 4 gave the same: %+v", policy, a)
		}
	}
}

func TestSizesAddUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := Config{Size: Size{Topics: rapid.IntRange(1, 500).Draw(t, "topics")}}
		c.Publishers = rapid.IntRange(c.Topics, min(MaxPublishers, c.Topics*placement.MaxPublishers)).Draw(t, "publishers")
		sum := 0
		for i, n := range c.sizes() {
			if n < 1 || n > placement.MaxPublishers {
				t.Fatalf("topic %d has %d publishers", i, n)
			}
			sum += n
		}
		if sum != c.Publishers {
			t.Fatalf("%d publishers, want %d", sum, c.Publishers)
		}
	})
}

func TestValidate(t *testing.T) {
	testkit.NoError(t, config().Validate())
	err := Config{Mcap: -1, Load: 1, Policy: "any", Rule: "any"}.Validate()
	for _, want := range []string{"brokers: 0", "topics: 0", "publishers: 0", "group size: 0", "ticks: 0", "mcap: -1", "load: 1", `policy: "any"`, `rule: "any"`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: want %q in it", err, want)
		}
	}
	c := config()
	c.Publishers = c.Topics - 1
	testkit.ErrorHas(t, c.Validate(), "publishers: 39, want 40", "fewer publishers than topics")
}
