//go:build linux

package stamps

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
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
	if len(os.Args) > 2 && os.Args[2] == sendCommand { // started as the sender
		if err := Run(context.Background(), os.Args[2:], os.Stdout, os.Stderr); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	testkit.Main(m)
}

func TestEveryMessageIsMeasured(t *testing.T) {
	c := config{conns: 5, size: 200, burst: 50, busy: 1, duration: 200 * time.Millisecond, seed: testkit.Seed(t)}
	modes := []hook.Mode{hook.Off}
	if s, err := hook.Open(hook.EBPF, hook.Config{}, quiet); err == nil { // kernel/hook tests whether opening must succeed
		modes = append(modes, hook.EBPF)
		testkit.Must(t, s.Close())
	}
	var rows []result
	for _, mode := range modes {
		r := testkit.Result(c.measure(t.Context(), mode, 2000)).Must(t)
		n := 0
		for _, k := range r.bySource {
			n += k
		}
		want := stamp.Read
		if mode == hook.EBPF {
			want = stamp.Exact
		}
		// If the machine is late by many messages, the records of a connection's first messages may be
		// lost.
		if n == 0 || 2*r.bySource[want] < n || r.off.max < r.off.p50 || r.readOff.p50 <= 0 || r.withWriteEnd == 0 {
			t.Errorf("%s: %+v", mode, r)
		}
		rows = append(rows, r)
	}
	var out bytes.Buffer
	writeTables(&out, rows)
	testkit.Equal(t, strings.Count(out.String(), "\n"), 3*5+5*len(rows), "lines:\n%s", &out)
}

// A stream that keeps its contract is judged backwards. The test shows the effect of the order.
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
	if res.off.max != 1000 || res.early != 0 || res.within != 500 || res.bySource[stamp.Exact] != 500 || res.perRead != 500 {
		t.Errorf("%+v", res)
	}
	if res.byStamp.access.max != 0 || res.byStamp.held.max != 0 {
		t.Errorf("by stamp: %+v, want no delay", res.byStamp)
	}
	// All at once, less the bucket, at 1100 msg/s: the last of 500 messages waits for 494 tokens.
	if wait := res.byRead.access.max; wait < 449*time.Millisecond || wait > 450*time.Millisecond || res.byRead.held != res.byRead.access {
		t.Errorf("by the time of the read: %+v", res.byRead)
	}
	if res.forgetful.access.max < 500*time.Millisecond {
		t.Errorf("without hindsight: %+v, want more than the stream's length", res.forgetful)
	}
}

func TestFlags(t *testing.T) {
	c, err := parse([]string{"--sources=off,ebpf", "--rate", "10,20", "--busy=3"}, io.Discard)
	if err != nil || !slices.Equal(c.modes, []hook.Mode{hook.Off, hook.EBPF}) || !slices.Equal(c.rates, []int{10, 20}) || c.busy != 3 || c.conns != 1000 {
		t.Errorf("%+v, %v", c, err)
	}
	for _, args := range []string{
		"fly", "--sources=kprobe", "--rate=0", "--rate=x", "--conns=0", "--size=10", "--burst=1", "--rounds=1", "--duration=-1s",
	} {
		if c, err := parse(strings.Fields(args), io.Discard); err == nil {
			t.Errorf("%s: %+v, want an error", args, c)
		}
	}
}
