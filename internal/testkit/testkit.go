// Package testkit has the common helpers of all tests: a leak check, seeds that are
// printed when a test fails, golden files, loopback listeners, and access to data beside
// the repository. Only _test files import it. It does not depend on the system under
// test; a helper that does belongs to the package's own tests. CONTRIBUTING.md explains
// its use.
package testkit

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"hash/maphash"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// SeedEnv overrides the seed of every test that calls Seed.
const SeedEnv = "SRTM_TEST_SEED"

var rewrite = flag.Bool("rewrite", false, "write golden files instead of comparing with them")

// Hang bounds a test's wait for an event. It only detects hangs and says nothing about
// speed: a busy machine withholds processors for seconds.
const Hang = 2 * time.Minute

// Main is the body of a TestMain: it runs the tests and fails if they leave a goroutine
// behind.
//
//	func TestMain(m *testing.M) { testkit.Main(m) }
func Main(m goleak.TestingM, options ...goleak.Option) {
	// Ginkgo listens for signals until the process ends.
	ginkgo := goleak.IgnoreTopFunction("github.com/onsi/ginkgo/v2/internal/interrupt_handler.(*InterruptHandler).registerForInterrupts.func2")
	goleak.VerifyTestMain(m, append(options, ginkgo)...)
}

// Seed returns a seed for t: the number in SRTM_TEST_SEED, or a fresh seed. When t fails,
// Seed logs the seed with the way to use it.
func Seed(t testing.TB) uint64 {
	t.Helper()
	seed := new(maphash.Hash).Sum64() // every Hash has a random seed
	if text := os.Getenv(SeedEnv); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 0, 64); err != nil {
			t.Fatalf("%s: %v", SeedEnv, err)
		}
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("to repeat with the same randomness: %s=%d go test -run '^%s$'", SeedEnv, seed, t.Name())
		}
	})
	return seed
}

// Rand returns a generator seeded with Seed(t). It is not safe for concurrent use; seed a
// separate generator for each goroutine from this generator.
func Rand(t testing.TB) *rand.Rand {
	t.Helper()
	return rand.New(rand.NewPCG(Seed(t), 0))
}

// Must ends the test with a failure if err is not nil.
func Must(t interface {
	Helper()
	Fatal(args ...any)
}, err error) {
	if err != nil {
		t.Helper() // only here, because Helper is too slow for the loop of a benchmark
		t.Fatal(err)
	}
}

// Private fails unless everything in dir, except dir itself, is private: files 0600 and
// folders 0700 at most. It returns the number of files by name suffix.
func Private(t testing.TB, dir string) map[string]int {
	t.Helper()
	kinds := map[string]int{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if mode := info.Mode().Perm(); mode&0o077 != 0 || !d.IsDir() && mode&0o100 != 0 {
			t.Errorf("%s has mode %04o", path, mode)
		}
		if !d.IsDir() {
			kinds[filepath.Ext(path)]++
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	return kinds
}

// Golden compares got with the file at path, relative to the package, and fails at the
// first different line. `go test ./that/package -rewrite` writes the file instead; read
// the diff before you commit it.
func Golden(t testing.TB, path string, got []byte) {
	t.Helper()
	if *rewrite {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatalf("golden file: %v", err)
		}
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatalf("golden file: %v", err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("golden file: %v (run the test with -rewrite to create it)", err)
	}
	if diff := firstDifference(want, got); diff != "" {
		t.Fatalf("%s: %s\nIf the change is meant, run the test with -rewrite and read the diff.", path, diff)
	}
}

// firstDifference describes the first line in which want and got differ, or returns "" if
// they are equal byte for byte.
func firstDifference(want, got []byte) string {
	if bytes.Equal(want, got) {
		return ""
	}
	w, g := bytes.SplitAfter(want, []byte("\n")), bytes.SplitAfter(got, []byte("\n"))
	line := func(lines [][]byte, i int) string {
		if i < len(lines) {
			return strconv.Quote(string(lines[i]))
		}
		return "no such line"
	}
	for i := 0; ; i++ {
		if i >= len(w) || i >= len(g) || !bytes.Equal(w[i], g[i]) {
			return fmt.Sprintf("differs at line %d\nwant %s\ngot  %s", i+1, line(w, i), line(g, i))
		}
	}
}

// Listen returns a TCP listener on a free port of 127.0.0.1, closed when t ends. Closing
// it earlier is fine.
func Listen(t testing.TB) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("listen: %v", err)
	}
	t.Cleanup(func() { _ = ln.Close() }) // closed already in most tests
	return ln
}

// Serve lets a server, such as a gRPC server, serve until t ends, and returns its
// address.
func Serve(t testing.TB, server interface {
	Serve(net.Listener) error
	Stop()
}) (address string) {
	t.Helper()
	ln := Listen(t)
	ServeOn(t, ln, server)
	return ln.Addr().String()
}

// ServeOn is Serve on a listener. It returns when the server accepts, because a gRPC
// server that is stopped earlier reports an error.
func ServeOn(t testing.TB, ln net.Listener, server interface {
	Serve(net.Listener) error
	Stop()
}) {
	t.Helper()
	accepting := &awaited{Listener: ln, accepts: make(chan struct{})}
	done := make(chan error, 1)
	go func() { done <- server.Serve(accepting) }()
	select {
	case <-accepting.accepts:
	case err := <-done:
		t.Fatalf("serve: %v", err)
	}
	t.Cleanup(func() {
		server.Stop()
		NoError(t, <-done)
	})
}

// awaited is a listener that reports the first Accept.
type awaited struct {
	net.Listener
	accepts chan struct{}
	once    sync.Once
}

func (l *awaited) Accept() (net.Conn, error) {
	l.once.Do(func() { close(l.accepts) })
	return l.Listener.Accept()
}

// Run runs run until t ends or stop is called, and stop waits for run. An error of run
// fails t.
func Run(t testing.TB, run func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		NoError(t, <-done)
	})
	t.Cleanup(stop)
	return stop
}

// Address returns a TCP address of this host without a listener. If the system has more
// loopback addresses than 127.0.0.1, the address is random, and other programs will
// hardly use a port of it.
func Address(t testing.TB) string {
	t.Helper()
	for _, host := range []string{fmt.Sprintf("127.%d.%d.%d", 1+rand.IntN(254), rand.IntN(255), 1+rand.IntN(254)), "127.0.0.1"} {
		if ln, err := net.Listen("tcp", net.JoinHostPort(host, "0")); err == nil {
			defer ln.Close()
			return ln.Addr().String()
		}
	}
	t.Fatal("no free port")
	return ""
}

// File writes a private file of the given name and text to a folder that is removed with
// t, and returns its path.
func File(t testing.TB, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	Must(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// Root returns the repository's root, the nearest folder above the test that contains
// go.work.
func Root(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatalf("working folder: %v", err)
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.work")); err == nil {
			return dir
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			t.Fatal("no go.work above the working folder")
		}
		dir = parent
	}
}

// Shared returns the folder ../shared beside the repository, with real traces. It skips t
// without this folder: the data is not ours to ship, and a clone without it is complete.
func Shared(t testing.TB) string {
	t.Helper()
	dir := filepath.Join(filepath.Dir(Root(t)), "shared")
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		t.Skipf("no folder ../shared beside the repository; this test reads real traces from it")
	}
	return dir
}

// Scenarios runs the files of testdata that match pattern. A file has commands, one per
// line, each with its expected result, compared as in Golden:
//
//	# a comment
//	command and words
//	----
//	what came of it
//
// begin starts a scenario and returns a function that carries out a command and returns
// the result in whole lines. `-` stands for an empty word.
func Scenarios(t *testing.T, pattern string, begin func(*testing.T) func(words []string) (string, error)) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("testdata", pattern))
	if err != nil || len(files) == 0 {
		t.Fatalf("no scenarios: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			input, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			do, answer := begin(t), false
			var out strings.Builder
			for n, line := range strings.Split(strings.TrimSuffix(string(input), "\n"), "\n") {
				switch {
				case line == "----":
					answer = true
				case line == "":
					answer = false
					out.WriteByte('\n')
				case answer: // the old answer
				case strings.HasPrefix(line, "#"):
					out.WriteString(line + "\n")
				default:
					words := strings.Fields(line)
					for i := range words {
						if words[i] == "-" {
							words[i] = ""
						}
					}
					result, err := do(words)
					if err != nil {
						t.Fatalf("%s:%d: %v", file, n+1, err)
					}
					out.WriteString(line + "\n----\n" + result)
				}
			}
			Golden(t, file, []byte(out.String()))
		})
	}
}
