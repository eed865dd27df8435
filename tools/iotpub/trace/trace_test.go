package trace_test

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/iotpub/trace"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const head = "offset_seconds,publisher_id,correlation_key,payload_bytes\n"

func zipped(t testing.TB, text string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	testkit.Result(io.WriteString(w, text)).Must(t)
	testkit.Must(t, w.Close())
	return b.Bytes()
}

func read(t testing.TB, rows string) *trace.Trace {
	t.Helper()
	return testkit.Result(trace.Read(strings.NewReader(head+rows), "t.csv")).Must(t)
}

func replay(t testing.TB, tr *trace.Trace, o trace.Options) *trace.Replay {
	t.Helper()
	return testkit.Result(tr.Replay(o)).Must(t)
}

func all(s schedule.Stream) []schedule.Event {
	var events []schedule.Event
	for {
		e, ok := s.Next()
		if !ok {
			return events
		}
		events = append(events, e)
	}
}

func event(at time.Duration, source, size int32) schedule.Event {
	return schedule.Event{At: at, Source: source, Count: 1, Size: size}
}

func TestReadPlainAndGzip(t *testing.T) {
	text := head + "0.0,a,k,10\n0.1,b,,20\n0.1,a,k,30\r\n7.25,\"c,c\",\"k \"\"2\"\"\",0\n"
	for name, in := range map[string][]byte{"plain": []byte(text), "gzip": zipped(t, text)} {
		tr, err := trace.Read(bytes.NewReader(in), "t.csv")
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		want := []trace.Publisher{{"a", "k"}, {"b", ""}, {"c,c", `k "2"`}}
		if !slices.Equal(tr.Publishers(), want) || tr.Len() != 4 || tr.Last() != 7250*time.Millisecond {
			t.Errorf("%s: %v, %d events, last at %v", name, tr.Publishers(), tr.Len(), tr.Last())
		}
	}
}

func TestReadNamesFileAndLine(t *testing.T) {
	long := strings.Repeat("x", 65)
	for name, c := range map[string]struct{ in, want string }{
		"empty":             {"", "t.csv: empty; want the header offset_seconds,publisher_id,correlation_key,payload_bytes"},
		"only the header":   {head, "t.csv: no events after the header"},
		"another header":    {"time,id\n0,a\n", `t.csv:1: header "time,id", want "offset_seconds,publisher_id,correlation_key,payload_bytes"`},
		"no header":         {"0.0,a,k,10\n", `t.csv:1: header "0.0,a,k,10", want`},
		"too few fields":    {head + "0.0,a,k,1\n1,a,k\n", "t.csv:3: 3 fields, want 4"},
		"too many fields":   {head + "0.0,a,k,1,2\n", "t.csv:2: 5 fields, want 4"},
		"no number":         {head + "now,a,k,1\n", `t.csv:2: offset_seconds "now": want a number of seconds`},
		"negative":          {head + "-1,a,k,1\n", `t.csv:2: offset_seconds "-1"`},
		"NaN":               {head + "NaN,a,k,1\n", `t.csv:2: offset_seconds "NaN"`},
		"infinite":          {head + "Inf,a,k,1\n", `t.csv:2: offset_seconds "Inf"`},
		"centuries":         {head + "1e12,a,k,1\n", `t.csv:2: offset_seconds "1e12"`},
		"not sorted":        {head + "0,a,k,1\n2.5,a,k,1\n\n2.4,a,k,1\n", "t.csv:5: offset_seconds 2.4 comes after 2.5: want rows sorted by time"},
		"no publisher":      {head + "0,,k,1\n", `t.csv:2: publisher_id "": want 1 .. 64 bytes`},
		"long publisher":    {head + "0," + long + ",k,1\n", "t.csv:2: publisher_id"},
		"publisher bytes":   {head + "0,\xff,k,1\n", `t.csv:2: publisher_id "\xff"`},
		"long key":          {head + "0,a," + long + ",1\n", "t.csv:2: correlation_key"},
		"key bytes":         {head + "0,a,\xc3\x28,1\n", "t.csv:2: correlation_key"},
		"two keys":          {head + "0,a,k,1\n0,b,k,1\n1,a,l,1\n", `t.csv:4: publisher "a" has the correlation key "l" here and "k" before`},
		"no size":           {head + "0,a,k,\n", `t.csv:2: payload_bytes ""`},
		"negative size":     {head + "0,a,k,-1\n", `t.csv:2: payload_bytes "-1"`},
		"huge size":         {head + "0,a,k,67108865\n", `t.csv:2: payload_bytes "67108865"`},
		"quote in a field":  {head + "0,a\"b,k,1\n", "t.csv:2: column 4: bare"},
		"quote not closed":  {head + "0,a,k,1\n0,\"a,k,1\n", "t.csv:3: column"},
		"a million letters": {strings.Repeat("y", 1_000_000), `t.csv:1: header "` + strings.Repeat("y", 80) + `..."`},
	} {
		t.Run(name, func(t *testing.T) {
			for kind, in := range map[string][]byte{"plain": []byte(c.in), "gzip": zipped(t, c.in)} {
				tr, err := trace.Read(bytes.NewReader(in), "t.csv")
				_, typed := errors.AsType[*trace.Error](err)
				if err == nil || tr != nil || !typed || !strings.HasPrefix(err.Error(), c.want) {
					t.Errorf("%s: %v, want %q", kind, err, c.want)
				}
				if err != nil && strings.Contains(err.Error(), "\n") {
					t.Errorf("%s: more than a line: %q", kind, err)
				}
			}
		})
	}
}

func TestReadDamagedGzip(t *testing.T) {
	whole := zipped(t, head+strings.Repeat("1,a,k,10\n", 1000))
	for name, c := range map[string]struct {
		in   []byte
		want string
	}{
		"cut off":       {whole[:len(whole)-9], "t.csv.gz:"},
		"header only":   {whole[:5], "t.csv.gz: damaged gzip header"},
		"bad checksum":  {append(slices.Clone(whole[:len(whole)-8]), 1, 2, 3, 4, 5, 6, 7, 8), "t.csv.gz:1002: gzip data is cut off or damaged"},
		"no such bytes": {[]byte("\x1f\x8bgarbage garbage"), "t.csv.gz: damaged gzip header"},
	} {
		tr, err := trace.Read(bytes.NewReader(c.in), "t.csv.gz")
		if err == nil || tr != nil || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

func TestOpen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trace.csv")
	if _, err := trace.Open(path); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), path) {
		t.Errorf("no such file: %v", err)
	}
	testkit.Must(t, os.WriteFile(path, []byte(head+"0,a,k,1\n"), 0o644))
	if tr, err := trace.Open(path); err != nil || tr.Len() != 1 {
		t.Errorf("%v, %v", tr, err)
	}
}

func FuzzRead(f *testing.F) {
	f.Add([]byte(head + "0.0,a,k,10\n0.1,b,,20\n"))
	f.Add([]byte(head + "0.0,\"a\",k,10\n0.0,a,k,10"))
	f.Add(zipped(f, head+"0,a,k,1\n"))
	f.Add([]byte("\x1f\x8b"))
	f.Add([]byte(head + "1,a,k,1\n0,a,k,1\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		tr, err := trace.Read(bytes.NewReader(in), "f")
		if err != nil {
			if tr != nil || !strings.HasPrefix(err.Error(), "f:") || strings.Contains(err.Error(), "\n") {
				t.Fatalf("%v, %v", tr, err)
			}
			return
		}
		r := testkit.Result(tr.Replay(trace.Options{Compress: 1, Copies: 1, Spread: trace.DefaultSpread})).Must(t)
		last := time.Duration(0)
		for _, e := range all(r.Stream()) {
			if e.At < last || int(e.Source) >= len(tr.Publishers()) {
				t.Fatalf("%+v after %v", e, last)
			}
			last = e.At
		}
	})
}

func TestReplayIsTheTrace(t *testing.T) {
	tr := read(t, "1,a,k,10\n1.5,b,,20\n1.5,a,k,30\n4,b,,40\n")
	r := replay(t, tr, trace.Options{Compress: 1, Copies: 1})
	s := time.Second
	want := []schedule.Event{event(s, 0, 10), event(3*s/2, 1, 20), event(3*s/2, 0, 30), event(4*s, 1, 40)}
	if got := all(r.Stream()); !slices.Equal(got, want) {
		t.Errorf("got %v\nwant %v", got, want)
	}
	if r.Span().Round(time.Millisecond) != 4*s {
		t.Errorf("span %v", r.Span())
	}
	got := r.Sources()
	if len(got) != 2 || got[0].ID != "a" || got[0].Key != "k" || math.Abs(got[0].Rate-0.5) > 1e-6 || got[1].ID != "b" || got[1].Key != "" {
		t.Errorf("sources %+v", got)
	}
}

func TestReplayCompresses(t *testing.T) {
	tr := read(t, "1,a,k,10\n4,a,k,40\n")
	r := replay(t, tr, trace.Options{Compress: 10, Copies: 1})
	got := all(r.Stream())
	if got[0].At != 100*time.Millisecond || got[1].At != 400*time.Millisecond || r.Span().Round(time.Millisecond) != 400*time.Millisecond {
		t.Errorf("%v in %v", got, r.Span())
	}
	if math.Abs(r.Sources()[0].Rate-5) > 1e-6 {
		t.Errorf("rate %v, want 5", r.Sources()[0].Rate)
	}
}

func TestReplayCutsOutARange(t *testing.T) {
	tr := read(t, "1,a,k,1\n2,b,k,2\n3,c,,3\n4,b,k,4\n5,a,k,5\n")
	r := replay(t, tr, trace.Options{Compress: 1, Copies: 1, From: 2 * time.Second, To: 5 * time.Second})
	want := []schedule.Event{event(0, 0, 2), event(time.Second, 1, 3), event(2*time.Second, 0, 4)}
	testkit.EqualSlices(t, all(r.Stream()), want)
	ids := []string{r.Sources()[0].ID, r.Sources()[1].ID}
	if !slices.Equal(ids, []string{"b", "c"}) || len(r.Sources()) != 2 || r.Span() != 3*time.Second {
		t.Errorf("sources %v, span %v", ids, r.Span())
	}
}

func TestReplayRotatesCopies(t *testing.T) {
	tr := read(t, "0,a,k,1\n1,b,,2\n7,a,k,3\n")
	r := replay(t, tr, trace.Options{Compress: 1, Copies: 2, To: 8 * time.Second})
	s := time.Second
	// Copy 1 starts at 4 s: 7 -> 3, 0 -> 4, 1 -> 5.
	want := []schedule.Event{event(0, 0, 1), event(s, 1, 2), event(3*s, 2, 3), event(4*s, 2, 1), event(5*s, 3, 2), event(7*s, 0, 3)}
	if got := all(r.Stream()); !slices.Equal(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
	var names []string
	for _, s := range r.Sources() {
		names = append(names, s.ID+"/"+s.Key)
	}
	testkit.EqualSlices(t, names, []string{"a/k", "b/", "a#1/k#1", "b#1/"}, "sources")
}

// Spreading keeps every event within its tick and changes only shared stamps. Every copy has every event once, rotated.
// The result is sorted, and the same for the same seed.
func TestReplayProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ticks := rapid.SliceOfN(rapid.IntRange(0, 60), 1, 80).Draw(t, "ticks")
		slices.Sort(ticks)
		alone := map[int]int{}
		var rows strings.Builder
		for i, tick := range ticks {
			alone[tick]++
			// The size names the row.
			fmt.Fprintf(&rows, "%d.%d,p%d,,%d\n", tick/10, tick%10, rapid.IntRange(0, 3).Draw(t, "publisher"), i)
		}
		tr := testkit.Result(trace.Read(strings.NewReader(head+rows.String()), "t")).Must(t)
		o := trace.Options{
			Compress: rapid.SampledFrom([]float64{0.5, 1, 7, 100}).Draw(t, "compress"),
			Copies:   rapid.IntRange(1, 5).Draw(t, "copies"),
			Spread:   rapid.SampledFrom([]time.Duration{0, trace.DefaultSpread}).Draw(t, "spread"),
			To:       8 * time.Second,
			Seed:     rapid.Uint64().Draw(t, "seed"),
		}
		r := testkit.Result(tr.Replay(o)).Must(t)
		events := all(r.Stream())
		if !slices.Equal(events, all(r.Stream())) {
			t.Fatal("two streams differ")
		}
		type row struct{ copy, index int }
		seen := map[row]bool{}
		perCopy := len(r.Sources()) / o.Copies
		last := time.Duration(0)
		for _, e := range events {
			if e.At < last {
				t.Fatalf("%v after %v", e.At, last)
			}
			last = e.At
			n := row{int(e.Source) / perCopy, int(e.Size)}
			if seen[n] {
				t.Fatalf("row %d of copy %d twice", n.index, n.copy)
			}
			seen[n] = true
			// Undo the compression and the rotation; the remaining shift is the spreading.
			tick := time.Duration(ticks[n.index]) * 100 * time.Millisecond
			shift := time.Duration(float64(o.To) * float64(n.copy) / float64(o.Copies))
			moved := time.Duration(float64(e.At)*o.Compress) - (tick - shift)
			if tick < shift {
				moved -= o.To
			}
			most := time.Duration(0)
			if alone[ticks[n.index]] > 1 {
				most = o.Spread
			}
			if rounding := time.Duration(o.Compress) + 1; moved < -rounding || moved > most+rounding {
				t.Fatalf("row %d of copy %d was moved by %v, want 0 .. %v", n.index, n.copy, moved, most)
			}
		}
		if len(seen) != len(ticks)*o.Copies {
			t.Fatalf("%d events, want %d x %d", len(seen), o.Copies, len(ticks))
		}
	})
}

// The test reads the recordings beside the repository and checks the first line of the table of scalings in their
// README: 54 copies of the detectors make 1,000 msg/s.
func TestRecordings(t *testing.T) {
	tr := testkit.Result(trace.Open(filepath.Join(testkit.Shared(t), "traces", "odot_hires_detgroups_3x3h.csv.gz"))).Must(t)
	keys := map[string]bool{}
	for _, p := range tr.Publishers() {
		if p.Key != "" {
			keys[p.Key] = true
		}
	}
	if tr.Len() != 201_808 || len(tr.Publishers()) != 108 || len(keys) != 28 {
		t.Errorf("%d events, %d publishers, %d groups; want 201808, 108, 28", tr.Len(), len(tr.Publishers()), len(keys))
	}
	r := replay(t, tr, trace.Options{Compress: 10, Copies: 54, Spread: trace.DefaultSpread})
	rate := 0.0
	for _, s := range r.Sources() {
		rate += s.Rate
	}
	n := len(schedule.Arrivals(schedule.Until(r.Stream(), 10*time.Second)))
	if len(r.Sources()) != 54*108 || math.Abs(rate-10_000) > 200 || math.Abs(float64(n)/10-rate) > 0.05*rate {
		t.Errorf("%d sources of %.0f msg/s, %d messages in 10 s; want 5832 of about 10,000", len(r.Sources()), rate, n)
	}
}

func TestReplayingDoesNotAllocate(t *testing.T) {
	tr := read(t, strings.Repeat("1,a,k,1\n1,b,k,1\n", 10)+strings.Repeat("2,a,k,1\n2,b,k,1\n", 2000))
	s := replay(t, tr, trace.Options{Compress: 1, Copies: 3, Spread: trace.DefaultSpread}).Stream()
	for range 6000 { // the first of 2 s makes pending grow
		s.Next()
	}
	testkit.Equal(t, testing.AllocsPerRun(1000, func() { s.Next() }), 0, "allocations an event")
}

func TestReplayRefuses(t *testing.T) {
	tr := read(t, "1,a,k,1\n2,a#1,k,2\n")
	long := read(t, "1,"+strings.Repeat("x", 63)+",,1\n")
	for name, c := range map[string]struct {
		tr   *trace.Trace
		o    trace.Options
		want string
	}{
		"no factor":       {tr, trace.Options{Copies: 1}, "compress: 0, want"},
		"NaN":             {tr, trace.Options{Compress: math.NaN(), Copies: 1}, "compress: NaN"},
		"no copy":         {tr, trace.Options{Compress: 1}, "copies: 0, want 1 .. 100000"},
		"backward range":  {tr, trace.Options{Compress: 1, Copies: 1, From: 5, To: 4}, "range: from 5ns to 4ns"},
		"negative spread": {tr, trace.Options{Compress: 1, Copies: 1, Spread: -1}, "spread: -1ns"},
		"empty range":     {tr, trace.Options{Compress: 1, Copies: 1, From: time.Minute, To: time.Hour}, "no event between 1m0s and 1h0m0s: the last one is at 2s"},
		"ids collide":     {tr, trace.Options{Compress: 1, Copies: 2}, `two publishers would have the id "a#1"`},
		"ids too long":    {long, trace.Options{Compress: 1, Copies: 2}, "longer than 64 bytes"},
	} {
		r, err := c.tr.Replay(c.o)
		if err == nil || r != nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	if _, err := tr.Replay(trace.Options{Spread: -1}); strings.Count(err.Error(), "\n") != 2 {
		t.Errorf("want three faults, one a line, got %v", err)
	}
}
