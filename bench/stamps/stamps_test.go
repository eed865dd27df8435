//go:build linux

package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/kernel/stamp"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == sendCommand { // started as the sender
		main()
	}
	testkit.Main(m)
}

func TestEveryMessageIsMeasured(t *testing.T) {
	c := config{conns: 5, size: 200, burst: 50, busy: 1, duration: 200 * time.Millisecond, seed: testkit.Seed(t)}
	modes := []hook.Mode{hook.Off}
	if s, err := hook.Open(hook.EBPF, hook.Config{}, quiet); err == nil { // kernel/hook tests whether it should
		modes = append(modes, hook.EBPF)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	var rows []result
	for _, mode := range modes {
		r, err := c.measure(t.Context(), mode, 2000)
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, k := range r.by {
			n += k
		}
		want := stamp.Read
		if mode == hook.EBPF {
			want = stamp.Exact
		}
		// On a machine that is late by many messages, the first ones of a
		// connection may have lost their records.
		if n == 0 || 2*r.by[want] < n || r.off.max < r.off.p50 || r.readOff.p50 <= 0 || r.known == 0 {
			t.Errorf("%s: %+v", mode, r)
		}
		rows = append(rows, r)
	}
	var out bytes.Buffer
	if err := writeTables(&out, rows); err != nil {
		t.Fatal(err)
	}
	if got := strings.Count(out.String(), "\n"); got != 3*3+5*len(rows) {
		t.Errorf("%d lines:\n%s", got, &out)
	}
}

// A stream that keeps its contract and is read backwards: what the order of
// judging makes of it.
func TestJudgingOutOfOrder(t *testing.T) {
	const rate, burst = 1000, 5
	r := &receiver{reads: 1}
	for i := range 500 {
		at := mono.Time(1e9 + i*1e6)
		r.samples = append(r.samples, sample{
			before: at - 1000, after: at + 1000, read: 2e9,
			arrival: stamp.Arrival{At: at, Source: stamp.Exact},
		})
	}
	slices.Reverse(r.samples)
	res := evaluate(r, burst, rate, 0)
	if res.off.max != 1000 || res.early != 0 || res.within != 500 || res.by[stamp.Exact] != 500 || res.perRead != 500 {
		t.Errorf("%+v", res)
	}
	if res.byStamp.access.max != 0 || res.byStamp.held.max != 0 {
		t.Errorf("by stamp: %+v, want no delay", res.byStamp)
	}
	// All at once, less the bucket, at 1100 msg/s: the last of 500 waits for
	// 494 tokens.
	if wait := res.byRead.access.max; wait < 449*time.Millisecond || wait > 450*time.Millisecond || res.byRead.held != res.byRead.access {
		t.Errorf("by the time of the read: %+v", res.byRead)
	}
	if res.forgetful.access.max < 500*time.Millisecond {
		t.Errorf("without hindsight: %+v, want more than the stream's length", res.forgetful)
	}
}

func TestFlags(t *testing.T) {
	c, err := parse("error", []string{"--sources=off,ebpf", "--rate", "10,20", "--busy=3"})
	if err != nil || !slices.Equal(c.modes, []hook.Mode{hook.Off, hook.EBPF}) || !slices.Equal(c.rates, []int{10, 20}) || c.busy != 3 || c.conns != 1000 {
		t.Errorf("%+v, %v", c, err)
	}
	for _, args := range []string{
		"fly", "error --sources=kprobe", "error --rate=0", "error --rate=x", "error --conns=0", "error --size=10", "error --burst=1",
		"error --rounds=1", "error --nsqd=x", "delay --burst=1", "cpu --busy=1", "cpu --rounds=0", "cpu --duration=-1s",
	} {
		a := strings.Fields(args)
		if c, err := parse(a[0], a[1:]); err == nil {
			t.Errorf("%s: %+v, want an error", args, c)
		}
	}
}

func TestColumnPairsRounds(t *testing.T) {
	us := []usage{{broker: 20 * time.Microsecond}, {broker: 44 * time.Microsecond}, {broker: 30 * time.Microsecond}}
	base := []usage{{broker: 20 * time.Microsecond}, {broker: 40 * time.Microsecond}, {broker: 25 * time.Microsecond}}
	got := column(us, base, func(u usage) time.Duration { return u.broker })
	if want := fmt.Sprintf("%.2f\t%.3f\t%.3f\t%.3f", 30.0, 1.1, 1.0, 1.2); got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestTheReleaseTraceIsRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trace")
	lines := "stamps,100,100,110\nstamps,1100,1100,1200\nstamps,2100,2600,2700\n"
	if err := os.WriteFile(path, []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	access, whole, err := readTrace(path, 3, 500)
	if err != nil || access.p50 != 500 || access.max != 500 || whole.p50 != 600 || whole.max != 600 {
		t.Errorf("%v, %v, %v", access, whole, err)
	}
	if _, _, err := readTrace(path, 4, 500); err == nil {
		t.Error("a message is missing, and no error")
	}
	for _, bad := range []string{"stamps,1,2\n", "stamps,1,x,3\n"} {
		if err := os.WriteFile(path, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, _, err := readTrace(path, 1, 0); err == nil {
			t.Errorf("%q is read", bad)
		}
	}
}
