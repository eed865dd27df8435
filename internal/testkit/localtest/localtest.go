// Package localtest starts programs of this module for a test with internal/local, single
// programs or a cluster. It builds each program on first use, ends the program with the
// test, and fails the test unless the program ends in good order. It depends only on the
// programs' flags.
package localtest

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
)

// ProgramsEnv names a folder with programs of this module that make test built for all
// test binaries. nsqd-race is nsqd with the race detector. Missing programs are built.
const ProgramsEnv = "SRTM_TEST_PROGRAMS"

// built holds the programs of this test binary.
var built struct {
	mu    sync.Mutex
	dir   string
	paths map[string]string
}

// Main is the body of a TestMain: testkit.Main, and no program stays behind.
//
//	func TestMain(m *testing.M) { localtest.Main(m) }
func Main(m goleak.TestingM, options ...goleak.Option) {
	testkit.Main(suite{m}, options...)
}

type suite struct{ goleak.TestingM }

func (s suite) Run() int {
	defer func() {
		if built.dir != "" {
			os.RemoveAll(built.dir)
		}
	}()
	return s.TestingM.Run()
}

// Program returns the path of a program, such as "tools/srtm", and builds it if
// necessary.
//
// Requires: TestMain is Main.
func Program(t testing.TB, pkg string) string {
	t.Helper()
	return build(t, pkg, "", func() []string { return nil })
}

// Racing is Program with the race detector: a race changes the exit code.
func Racing(t testing.TB, pkg string) string {
	t.Helper()
	return build(t, pkg, "-race", func() []string { return []string{"-race"} })
}

// build returns the path of a variant of a program. It calls flags, for go build, only if
// it builds the variant.
func build(t testing.TB, pkg, variant string, flags func() []string) string {
	t.Helper()
	name := filepath.Base(pkg) + variant
	if dir := os.Getenv(ProgramsEnv); dir != "" {
		path := filepath.Join(dir, name)
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	built.mu.Lock()
	defer built.mu.Unlock()
	if path := built.paths[name]; path != "" {
		return path
	}
	if built.dir == "" {
		dir, err := os.MkdirTemp("", "srtm-test-")
		testkit.Must(t, err)
		built.dir, built.paths = dir, map[string]string{}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	path := filepath.Join(built.dir, name)
	testkit.Must(t, local.Build(ctx, "github.com/srtm-io/srtm/"+pkg, path, flags()...))
	built.paths[name] = path
	return path
}

// Folder returns a folder with programs.
func Folder(t testing.TB, pkgs ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, pkg := range pkgs {
		testkit.Must(t, os.Symlink(Program(t, pkg), filepath.Join(dir, filepath.Base(pkg))))
	}
	return dir
}

// Watch takes the result of starting a process. The process ends with the test, which
// fails if the end fails.
func Watch(t testing.TB, p *local.Process, err error) *local.Process {
	t.Helper()
	testkit.Must(t, err)
	t.Cleanup(func() {
		if err := p.Stop(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("%q printed last:\n%s", p.Flags, p.Output())
		}
	})
	return p
}

// Run runs a program until the test ends. The program is ready when it answers at an HTTP
// address, possibly with a path: "127.0.0.1:4171/ping".
func Run(t testing.TB, program, url string, flags ...string) *local.Process {
	t.Helper()
	p, err := local.Run(program, t.TempDir(), flags, local.Answers("http://"+url))
	return Watch(t, p, err)
}

// NSQD runs an nsqd, ours if binary is "", until the test ends.
func NSQD(t testing.TB, binary string, flags ...string) *local.Process {
	t.Helper()
	if binary == "" {
		binary = Program(t, "nsqd")
	}
	p, err := local.NSQD(binary, t.TempDir(), flags...)
	return Watch(t, p, err)
}

// Ports returns count free loopback addresses.
func Ports(t testing.TB, count int) []string {
	t.Helper()
	addresses, err := local.Ports(count)
	testkit.Must(t, err)
	return addresses
}

// Cluster is a loaddistributor and brokers, b1, b2, ...
type Cluster struct {
	RPC, Web string // the loaddistributor's addresses
	Control  *local.Process
	Brokers  []*local.Process
}

// Start starts a cluster until the test ends, with flags of the loaddistributor and of
// the brokers. It waits until all brokers have joined.
func Start(t testing.TB, brokers int, control []string, flags ...string) *Cluster {
	t.Helper()
	addresses := Ports(t, 2)
	c := &Cluster{RPC: addresses[0], Web: addresses[1]}
	c.Control = Run(t, Program(t, "loaddistributor"), c.Web+"/ping", append([]string{"--grpc-address=" + c.RPC, "--http-address=" + c.Web, "--tcp-address=", "--store=memory"}, control...)...)
	for range brokers {
		c.start(t, flags)
	}
	c.joined(t)
	return c
}

// Join adds a broker with flags and returns it once it has joined.
func (c *Cluster) Join(t testing.TB, flags ...string) *local.Process {
	t.Helper()
	p := c.start(t, flags)
	c.joined(t)
	return p
}

func (c *Cluster) start(t testing.TB, flags []string) *local.Process {
	t.Helper()
	p := NSQD(t, "", append([]string{"--loaddistributor-address=" + c.RPC, fmt.Sprintf("--broker-id=b%d", len(c.Brokers)+1)}, flags...)...)
	c.Brokers = append(c.Brokers, p)
	return p
}

func (c *Cluster) joined(t testing.TB) {
	t.Helper()
	testkit.WaitFor(t, "brokers that have joined", func() bool {
		text, _, err := Ask(http.MethodGet, "http://"+c.Web+"/nodes", "")
		return err == nil && strings.Count(text, "tcp_port") == len(c.Brokers)
	})
}

// MustAsk is Ask for a request that must be answered with 200.
func MustAsk(t testing.TB, method, url, body string) string {
	t.Helper()
	text, code, err := Ask(method, url, body)
	if err != nil || code != http.StatusOK {
		t.Fatalf("%s %s: %d %s, %v", method, url, code, text, err)
	}
	return text
}

// Ask sends an HTTP request and returns the answer's body and status.
func Ask(method, url, body string) (text string, code int, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), local.Patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return "", 0, err
	}
	res, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(req)
	if err != nil {
		return "", 0, err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	return string(b), res.StatusCode, err
}
