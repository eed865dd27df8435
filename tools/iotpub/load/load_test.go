package load_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tools/iotpub/load"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const recording = `offset_seconds,publisher_id,correlation_key,payload_bytes
0.0,a,k,40
0.5,b,k,50
1.0,c,,60
1.5,a,k,40
`

func recorded(t *testing.T, text string) string {
	t.Helper()
	return testkit.File(t, "r.csv", text)
}

func events(s schedule.Stream, n int) (all []schedule.Event) {
	for range n {
		e, ok := s.Next()
		if !ok {
			break
		}
		all = append(all, e)
	}
	return all
}

func TestDefaultIsThePapers(t *testing.T) {
	l := testkit.Result(load.Default().Build()).Must(t)
	if len(l.Sources) != 1000 || l.Rate() != 10_000 || l.Span != 0 || len(l.Groups) != 1 {
		t.Errorf("%d publishers, %v msg/s, span %v, %d groups", len(l.Sources), l.Rate(), l.Span, len(l.Groups))
	}
	testkit.Equal(t, l.Text, "1000 poisson publishers at 10 msg/s each, 10000 msg/s in all", "text")
}

func TestTextNamesBatchesAndGroups(t *testing.T) {
	o := load.Default()
	o.Spec.Batch, o.Spec.GroupSize, o.Spec.Sync = 10, 25, true
	l, err := o.Build()
	if err != nil || !strings.HasSuffix(l.Text, ", batches of 10, synchronised groups of 25") {
		t.Errorf("%v, %v", l, err)
	}
}

func TestLoadReplaysARecording(t *testing.T) {
	o := load.Default()
	o.Trace, o.Replay.Compress = recorded(t, recording), 2
	l := testkit.Result(o.Build()).Must(t)
	var ids []string
	for _, s := range l.Sources {
		ids = append(ids, s.ID)
	}
	if !slices.Equal(ids, []string{"a", "b", "c"}) || l.Groups != nil || l.Span.Round(10*time.Millisecond) != 800*time.Millisecond {
		t.Errorf("sources %v, groups %v, span %v", ids, l.Groups, l.Span)
	}
	testkit.Equal(t, len(events(l.Stream(), 100)), 4, "events")
	o.Keep = 2
	l = testkit.Result(o.Build()).Must(t)
	for _, e := range events(l.Stream(), 100) {
		if e.Source > 1 {
			t.Errorf("an event of source %d, kept are 2", e.Source)
		}
	}
	if len(l.Sources) != 2 || len(events(l.Stream(), 100)) != 3 {
		t.Errorf("%d sources, %d events; want 2, 3", len(l.Sources), len(events(l.Stream(), 100)))
	}
}

func TestBuildRefuses(t *testing.T) {
	broken := recorded(t, recording+"1.0,a,k,40\n")
	for name, c := range map[string]struct {
		change func(*load.Options)
		want   string
	}{
		"a fault of the fleet":   {func(o *load.Options) { o.Spec.Rate = -1 }, "rate: -1 msg/s"},
		"keep without a trace":   {func(o *load.Options) { o.Keep = 1 }, "keep: only with a trace"},
		"negative keep":          {func(o *load.Options) { o.Trace, o.Keep = broken, -1 }, "keep: -1 publishers"},
		"a fault of the replay":  {func(o *load.Options) { o.Trace, o.Replay.Copies = broken, 0 }, "copies: 0"},
		"no such file":           {func(o *load.Options) { o.Trace = "/no/such/file.csv" }, "/no/such/file.csv"},
		"a fault of the file":    {func(o *load.Options) { o.Trace = broken }, broken + ":6: offset_seconds 1.0 comes after 1.5"},
		"a range without events": {func(o *load.Options) { o.Trace, o.Replay.From = recorded(t, recording), time.Hour }, "r.csv: no event between"},
	} {
		o := load.Default()
		c.change(&o)
		l, err := o.Build()
		if err == nil || l != nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

// The flags that Args returns, read by Flags, describe the same load.
func TestArgsAreReadBack(t *testing.T) {
	path := recorded(t, recording)
	rapid.Check(t, func(t *rapid.T) {
		o := load.Default()
		o.Spec.Seed = rapid.Uint64().Draw(t, "seed")
		if rapid.Bool().Draw(t, "trace") {
			o.Trace = path
			o.Replay.Compress = rapid.Float64Range(0.001, 1000).Draw(t, "compress")
			o.Replay.Copies = rapid.IntRange(1, 5).Draw(t, "copies")
			o.Replay.From = time.Duration(rapid.Int64Range(0, 1e9).Draw(t, "from"))
			o.Replay.To = time.Duration(rapid.Int64Range(15e8, 1e10).Draw(t, "to"))
			o.Replay.Spread = time.Duration(rapid.Int64Range(0, 1e9).Draw(t, "spread"))
			o.Keep = rapid.IntRange(0, 10).Draw(t, "keep")
		} else {
			o.Spec.Publishers = rapid.IntRange(1, 50).Draw(t, "publishers")
			o.Spec.Rate = rapid.Float64Range(0.001, 1000).Draw(t, "rate")
			o.Spec.Batch = rapid.IntRange(1, 9).Draw(t, "batch")
			o.Spec.GroupSize = rapid.IntRange(0, 60).Draw(t, "group")
			o.Spec.Sync = o.Spec.GroupSize > 1 && rapid.Bool().Draw(t, "sync")
			o.Spec.Process = rapid.SampledFrom([]schedule.Process{schedule.Poisson, schedule.Periodic}).Draw(t, "process")
			o.Spec.Size = rapid.IntRange(0, 1000).Draw(t, "size")
			if rapid.Bool().Draw(t, "sizes") {
				o.Spec.SizeTo = o.Spec.Size + rapid.IntRange(1, 1000).Draw(t, "sizes above")
			}
		}
		back := load.Default()
		fs := pflag.NewFlagSet("t", pflag.ContinueOnError)
		back.Flags(fs)
		testkit.Must(t, fs.Parse(o.Args()))
		if back != o {
			t.Fatalf("%v became %+v, want %+v", o.Args(), back, o)
		}
		a := testkit.Result(o.Build()).Must(t)
		b := testkit.Result(back.Build()).Must(t)
		if a.Text != b.Text || !slices.Equal(a.Sources, b.Sources) || !slices.Equal(events(a.Stream(), 50), events(b.Stream(), 50)) {
			t.Fatal("the loads differ")
		}
	})
}
