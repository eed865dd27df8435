package testkit_test

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// A suite under testkit.Main shows that Ginkgo's own goroutines do not count as leaks.
func TestSuite(t *testing.T) {
	RegisterFailHandler(Fail)
	RunSpecs(t, "testkit")
}

var _ = Describe("the leak check", func() {
	It("lets a Ginkgo suite pass", func() { Expect(testkit.Rand(GinkgoTB())).NotTo(BeNil()) })
})

// recorder stands for a test whose verdict the test inspects. A helper that fails the recorder ends
// its goroutine, as with a real test.
type recorder struct {
	testing.TB
	failed   bool
	skipped  bool
	log      strings.Builder
	cleanups []func()
}

func (r *recorder) Helper()          {}
func (r *recorder) Name() string     { return "TestRecorded" }
func (r *recorder) Failed() bool     { return r.failed }
func (r *recorder) Cleanup(f func()) { r.cleanups = append(r.cleanups, f) }
func (r *recorder) Logf(format string, args ...any) {
	fmt.Fprintf(&r.log, format+"\n", args...)
}
func (r *recorder) Fatal(args ...any) { r.Fatalf("%s", fmt.Sprint(args...)) }
func (r *recorder) Fatalf(format string, args ...any) {
	r.failed = true
	r.Logf(format, args...)
	runtime.Goexit()
}
func (r *recorder) Errorf(format string, args ...any) {
	r.failed = true
	r.Logf(format, args...)
}
func (r *recorder) Skipf(format string, args ...any) {
	r.skipped = true
	r.Logf(format, args...)
	runtime.Goexit()
}

// run calls f as a test, and then the test's cleanups.
func (r *recorder) run(f func()) *recorder {
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			for _, c := range r.cleanups {
				c()
			}
		}()
		f()
	}()
	<-done
	return r
}

func TestSeedComesFromTheEnvironment(t *testing.T) {
	t.Setenv(testkit.SeedEnv, "0x2a")
	if got := testkit.Seed(t); got != 42 {
		t.Errorf("seed %d, want 42", got)
	}
	a, b := testkit.Rand(t), testkit.Rand(t)
	for range 10 {
		if x, y := a.Uint64(), b.Uint64(); x != y {
			t.Fatalf("same seed, but %d and %d", x, y)
		}
	}
}

func TestSeedsDifferFromRunToRun(t *testing.T) {
	t.Setenv(testkit.SeedEnv, "")
	if a, b := testkit.Seed(t), testkit.Seed(t); a == b {
		t.Errorf("two fresh seeds are both %d", a)
	}
}

func TestSeedIsPrintedOnlyOnFailure(t *testing.T) {
	t.Setenv(testkit.SeedEnv, "7")
	r := new(recorder)
	r.run(func() { testkit.Seed(r) })
	if r.log.Len() != 0 {
		t.Errorf("a passing test logged %q", &r.log)
	}
	r = new(recorder)
	r.run(func() { testkit.Seed(r); r.Fatalf("wrong") })
	if want := "SRTM_TEST_SEED=7 go test -run '^TestRecorded$'"; !strings.Contains(r.log.String(), want) {
		t.Errorf("a failing test logged %q, want %q in it", &r.log, want)
	}
}

func TestSeedRefusesNonsense(t *testing.T) {
	t.Setenv(testkit.SeedEnv, "lucky")
	r := new(recorder)
	if r.run(func() { testkit.Seed(r) }); !r.failed || !strings.Contains(r.log.String(), "lucky") {
		t.Errorf("failed=%v, log %q; want a failure that quotes the value", r.failed, &r.log)
	}
}

func TestGolden(t *testing.T) {
	path := filepath.Join(t.TempDir(), "want.txt")
	testkit.Must(t, os.WriteFile(path, []byte("one\ntwo\nthree\n"), 0o644))
	for _, c := range []struct {
		name, got, want string // want: in the failure, "" for none
	}{
		{"equal", "one\ntwo\nthree\n", ""},
		{"changed line", "one\nTWO\nthree\n", "differs at line 2\nwant \"two\\n\"\ngot  \"TWO\\n\""},
		{"missing line", "one\ntwo\n", "differs at line 3"},
		{"added line", "one\ntwo\nthree\nfour", "got  \"four\""},
		{"no end of line", "one\ntwo\nthree", "differs at line 3"},
		{"empty", "", "differs at line 1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := new(recorder)
			r.run(func() { testkit.Golden(r, path, []byte(c.got)) })
			if r.failed != (c.want != "") || !strings.Contains(r.log.String(), c.want) {
				t.Errorf("failed=%v, log:\n%s\nwant %q in it", r.failed, &r.log, c.want)
			}
		})
	}
	r := new(recorder)
	r.run(func() { testkit.Golden(r, path+".absent", nil) })
	if !r.failed || !strings.Contains(r.log.String(), "-rewrite") {
		t.Errorf("a missing file: failed=%v, log %q; want a failure that names -rewrite", r.failed, &r.log)
	}
}

func TestListenerIsClosedWithTheTest(t *testing.T) {
	r := new(recorder)
	var ln net.Listener
	r.run(func() { ln = testkit.Listen(r) })
	if ip := ln.Addr().(*net.TCPAddr).IP; !ip.IsLoopback() {
		t.Errorf("listens on %v, want a loopback address", ip)
	}
	if c, err := net.Dial("tcp", ln.Addr().String()); err == nil {
		_ = c.Close()
		t.Error("still listening after the test")
	}
}

func TestRootHoldsThisModule(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(testkit.Root(t), "go.mod"))
	if err != nil || !strings.HasPrefix(string(text), "module github.com/srtm-io/srtm\n") {
		t.Errorf("go.mod in the root: %v, %.40q", err, text)
	}
}

// Tests Shared on an artificial module, with and without a folder beside the module.
func TestShared(t *testing.T) {
	top := t.TempDir()
	repo := filepath.Join(top, "repo")
	testkit.Must(t, os.MkdirAll(filepath.Join(repo, "pkg"), 0o755))
	testkit.Must(t, os.WriteFile(filepath.Join(repo, "go.work"), []byte("go 1.26\n"), 0o644))
	t.Chdir(filepath.Join(repo, "pkg"))

	r := new(recorder)
	if r.run(func() { testkit.Shared(r) }); !r.skipped || !strings.Contains(r.log.String(), "../shared") {
		t.Errorf("without the folder: skipped=%v, log %q", r.skipped, &r.log)
	}
	want := filepath.Join(top, "shared")
	testkit.Must(t, os.Mkdir(want, 0o755))
	r = new(recorder)
	var got string
	if r.run(func() { got = testkit.Shared(r) }); r.skipped || got != want {
		t.Errorf("with the folder: skipped=%v, %q; want %q", r.skipped, got, want)
	}
}

func TestCertificatesAreTrustedThroughTheirAuthority(t *testing.T) {
	a := testkit.NewAuthority(t)
	c := a.Certificate("sensor7")
	leaf, err := x509.ParseCertificate(c.TLS.Certificate[0])
	testkit.Must(t, err)
	if leaf.Subject.CommonName != "sensor7" {
		t.Errorf("common name %q", leaf.Subject.CommonName)
	}
	for _, host := range []string{"127.0.0.1", "localhost", "sensor7"} {
		if _, err := leaf.Verify(x509.VerifyOptions{Roots: a.Pool, DNSName: host}); err != nil {
			t.Errorf("%s: %v", host, err)
		}
	}
	if _, err := leaf.Verify(x509.VerifyOptions{Roots: testkit.NewAuthority(t).Pool}); err == nil {
		t.Error("another authority vouches for it")
	}
	file, err := os.ReadFile(a.File)
	testkit.Must(t, err)
	if pool := x509.NewCertPool(); !pool.AppendCertsFromPEM(file) || !pool.Equal(a.Pool) {
		t.Error("the authority's file does not hold its certificate")
	}
}

func TestEqual(t *testing.T) {
	bad := errors.New("bad")
	for name, c := range map[string]struct {
		check func(r *recorder)
		want  string // "": nothing is reported
	}{
		"equal":         {func(r *recorder) { testkit.Equal(r, 1, 1) }, ""},
		"other":         {func(r *recorder) { testkit.Equal(r, 1, 2) }, "got 1, want 2\nafter\n"},
		"of what":       {func(r *recorder) { testkit.Equal(r, "a", "b", "%d of %d", 1, 2) }, "1 of 2: got \"a\", want \"b\"\nafter\n"},
		"must":          {func(r *recorder) { testkit.MustEqual(r, 1, 2) }, "got 1, want 2\n"},
		"no slice":      {func(r *recorder) { testkit.EqualSlices(r, nil, []int{}) }, ""},
		"other slices":  {func(r *recorder) { testkit.EqualSlices(r, nil, []int{1}) }, "got [], want [1]\nafter\n"},
		"no error":      {func(r *recorder) { testkit.NoError(r, nil) }, ""},
		"an error":      {func(r *recorder) { testkit.NoError(r, bad, "%d", 1) }, "1: bad\nafter\n"},
		"is":            {func(r *recorder) { testkit.ErrorIs(r, fmt.Errorf("very %w", bad), bad) }, ""},
		"is not":        {func(r *recorder) { testkit.ErrorIs(r, nil, bad) }, "got <nil>, want bad\nafter\n"},
		"has":           {func(r *recorder) { testkit.ErrorHas(r, bad, "a") }, ""},
		"has not":       {func(r *recorder) { testkit.ErrorHas(r, bad, "c", "here") }, "here: error bad, want one with \"c\"\nafter\n"},
		"a value":       {func(r *recorder) { testkit.Equal(r, testkit.Result(1, nil).Must(r), 1) }, ""},
		"the value":     {func(r *recorder) { testkit.Result(1, nil).Equal(r, 1) }, ""},
		"another value": {func(r *recorder) { testkit.Result(1, nil).Equal(r, 2) }, "got 1, want 2, <nil>\nafter\n"},
		"with an error": {func(r *recorder) { testkit.Result(1, bad).MustEqual(r, 1, "it") }, "it: got 1, want 1, bad\n"},
		"no value":      {func(r *recorder) { testkit.Result(1, bad).Must(r) }, "bad\n"},
		"has no error":  {func(r *recorder) { testkit.ErrorHas(r, nil, "") }, "error <nil>, want one with \"\"\nafter\n"},
	} {
		r := new(recorder)
		r.run(func() {
			c.check(r)
			if r.failed {
				r.Logf("after")
			}
		})
		if got := r.log.String(); r.failed != (c.want != "") || got != c.want {
			t.Errorf("%s: failed=%v, %q, want %q", name, r.failed, got, c.want)
		}
	}
}

func TestRunEndsWithTheTest(t *testing.T) {
	bad := errors.New("bad")
	r := new(recorder)
	r.run(func() {
		testkit.Run(r, func(ctx context.Context) error { <-ctx.Done(); return bad })
		testkit.Run(r, func(ctx context.Context) error { <-ctx.Done(); return nil })()
	})
	if got := r.log.String(); !r.failed || got != "bad\n" {
		t.Errorf("failed=%v, %q; want the error of the one that was not stopped", r.failed, got)
	}
}

// slow is a server that starts slowly. An earlier stop is an error.
type slow struct{ stopped chan struct{} }

func (s slow) Serve(ln net.Listener) error {
	for range 1000 {
		runtime.Gosched()
	}
	select {
	case <-s.stopped:
		return errors.New("stopped before it served")
	default:
	}
	go func() { <-s.stopped; ln.Close() }()
	_, _ = ln.Accept()
	return nil
}

func (s slow) Stop() { close(s.stopped) }

func TestAServerAcceptsBeforeItIsStopped(t *testing.T) {
	t.Run("that takes its time", func(t *testing.T) { testkit.Serve(t, slow{make(chan struct{})}) })
}

func TestWhatNeverComes(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		r, asked := new(recorder), 0
		r.run(func() {
			testkit.WaitFor(r, "the third time", func() bool { asked++; return asked == 3 })
			testkit.WaitFor(r, "the sea", func() bool { return false })
		})
		if want := fmt.Sprintf("not within %v: the sea\n", testkit.Hang); asked != 3 || r.log.String() != want {
			t.Errorf("asked %d times, %q, want 3, %q", asked, &r.log, want)
		}
	})
}

func TestMetric(t *testing.T) {
	reg := prometheus.NewRegistry()
	c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "c"}, []string{"to", "of"})
	reg.MustRegister(c)
	c.WithLabelValues("a", "x").Add(1)
	c.WithLabelValues("a", "y").Add(2)
	c.WithLabelValues("b", "x").Add(4)
	testkit.Equal(t, testkit.Metric(t, reg, "c"), 7)
	testkit.Equal(t, testkit.Metric(t, reg, "c", "x"), 5)
	testkit.Equal(t, testkit.Metric(t, reg, "c", "x", "a"), 1)
	r := new(recorder)
	r.run(func() { testkit.Metric(r, reg, "c", "y", "b") })
	testkit.Equal(t, r.log.String(), "no metric c[\"y\" \"b\"]\n")
}

// Without the bubble's single processor, the race detector aborts this test.
func TestExpiredTimersOfABubble(t *testing.T) {
	before := runtime.GOMAXPROCS(0)
	testkit.Bubble(t, func(t *testing.T) {
		var readers sync.WaitGroup
		for range 50 {
			readers.Go(func() {
				for range 500 {
					expired := time.NewTimer(time.Millisecond)
					<-time.After(2 * time.Millisecond)
					select {
					case <-expired.C:
					default:
						t.Error("the timer has not expired")
					}
				}
			})
		}
		readers.Wait()
	})
	if now := runtime.GOMAXPROCS(0); now != before {
		t.Errorf("%d processors after the bubble, %d before it", now, before)
	}
}
