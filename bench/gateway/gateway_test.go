package gateway

import (
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/srtm-io/srtm/bench/decide"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == decide.BareCommand {
		fmt.Fprintln(os.Stderr, decide.Serve(os.Args[2:]))
		os.Exit(1)
	}
	localtest.Main(m)
}

// The bare proxy and the backends answer, and their requests are counted.
func TestWhatIsComparedWithIsMeasured(t *testing.T) {
	start := func(kind, arg string) *decide.Server {
		s := testkit.Result(decide.Bare(kind, arg)).Must(t)
		t.Cleanup(func() { s.Stop() })
		return s
	}
	backend := start("backend", "4")
	proxy := start("proxy", backend.At)
	f, err := ask(proxy, 100, 200*time.Millisecond, 8)
	testkit.Must(t, err)
	testkit.Equal(t, served(t.Context(), []*decide.Server{backend})[0], 20, "requests arrived of 20")
	if f.mean <= 0 || f.sd <= 0 || f.p99 < f.p50 || f.cpu <= 0 {
		t.Errorf("%+v", f)
	}
	if n, err := (&subject{metrics: proxy.At}).mallocs(t.Context()); err != nil || n <= 0 {
		t.Errorf("%v allocations, %v", n, err)
	}
}
