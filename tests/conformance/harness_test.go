package conformance

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// A case:
//
//	func TestSub(t *testing.T) {
//		group(t)
//		check(t, "twice", func(t *testing.T) {
//			n := common(t)             // the nsqd with default flags that all share
//			p := n.open(t)             // a raw connection, the magic sent
//			p.send("SUB %s ch\n", n.topic())
//			p.ok()
//			p.send("SUB %s ch\n", n.topic())
//			p.fatal("E_INVALID")       // the frame, and that the connection ends
//		})
//	}
//
// Cases run side by side, each with topics of its own. Nothing waits for time
// to pass but reads with a deadline: patience, for what must come.

const (
	// patience is how long to wait for what must happen. Only a failure takes
	// so long, so it is generous.
	patience = 15 * time.Second
	// silence is how long to listen for what must not come. Too short a one can
	// only miss a fault, never report one.
	silence = 150 * time.Millisecond
)

// group begins a test function that consists of cases.
func group(t *testing.T) {
	t.Helper()
	skipPending(t)
	t.Parallel()
}

// check runs a case, beside all others.
func check(t *testing.T, name string, f func(t *testing.T)) {
	t.Helper()
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		skipPending(t)
		f(t)
	})
}

func skipPending(t *testing.T) {
	t.Helper()
	if !under.srtm {
		return
	}
	if why := notYet(t.Name()); why != "" && !under.pending {
		t.Skip("pending: " + why)
	}
}

// node is an nsqd that runs.
type node struct {
	// Set once.
	tcp, http string // addresses
	dir       string // its working folder
	flags     []string
	cmd       *exec.Cmd // nil: it is not ours to stop
	output    *record
	done      chan struct{} // closed when the process has ended

	err error // of the process; valid once done is closed
}

// record keeps what a process prints.
type record struct {
	mu struct {
		sync.Mutex
		bytes.Buffer
	}
}

func (r *record) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mu.Write(p)
}

func (r *record) String() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mu.String()
}

// tail returns the last of it.
func (r *record) tail() string {
	const most = 1500
	s := r.String()
	return s[max(0, len(s)-most):]
}

// commons are the nsqd with default flags and the folders it needs.
var commons shared

type shared struct {
	mu struct {
		sync.Mutex
		node *node
		err  error
	}
}

// common returns the nsqd that all cases share which need no flags.
func common(t *testing.T) *node {
	t.Helper()
	s := &commons
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.node == nil && s.mu.err == nil {
		s.mu.node, s.mu.err = s.make()
	}
	if s.mu.err != nil {
		t.Fatal(s.mu.err)
	}
	n := s.mu.node
	t.Cleanup(func() {
		if t.Failed() && n.cmd != nil {
			select {
			case <-n.done:
				t.Logf("nsqd has ended (%v) and printed last:\n%s", n.err, n.output.tail())
			default:
			}
		}
	})
	return n
}

func (s *shared) make() (*node, error) {
	if under.binary == "" {
		return &node{tcp: under.tcp, http: under.http}, nil
	}
	dir, err := os.MkdirTemp("", "conformance")
	if err != nil {
		return nil, err
	}
	return launch(dir, nil)
}

func (s *shared) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.mu.node
	if n == nil || n.cmd == nil {
		return nil
	}
	return errors.Join(n.end(), os.RemoveAll(n.dir))
}

// start runs an nsqd with these flags for as long as t lasts. It skips t where
// the nsqd under test runs already.
func start(t *testing.T, flags ...string) *node {
	t.Helper()
	return startIn(t, t.TempDir(), flags...)
}

// startIn is start in a folder that may hold what another nsqd left there.
func startIn(t *testing.T, dir string, flags ...string) *node {
	t.Helper()
	if under.binary == "" {
		t.Skipf("needs an nsqd with the flags %q; the one under test runs already", flags)
	}
	n, err := launch(dir, flags)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.end(); err != nil {
			t.Errorf("stop nsqd: %v", err)
		}
		if t.Failed() {
			t.Logf("nsqd %q printed last:\n%s", flags, n.output.tail())
		}
	})
	return n
}

// launch starts the nsqd on free loopback ports and waits until it answers.
// Another process may take a port between its choice and its use; then it is
// tried again with others.
func launch(dir string, flags []string) (*node, error) {
	const attempts = 5
	var errs []error
	for range attempts {
		n, err := launchOnce(dir, flags)
		if err == nil {
			return n, nil
		}
		errs = append(errs, err)
		if !strings.Contains(err.Error(), "address already in use") {
			break
		}
	}
	return nil, errors.Join(errs...)
}

func launchOnce(dir string, flags []string) (*node, error) {
	free, err := freePorts(2)
	if err != nil {
		return nil, err
	}
	n := &node{tcp: free[0], http: free[1], dir: dir, flags: flags, output: new(record), done: make(chan struct{})}
	args := append([]string{"--tcp-address=" + n.tcp, "--http-address=" + n.http, "--broadcast-address=127.0.0.1"}, flags...)
	n.cmd = exec.Command(under.binary, args...)
	n.cmd.Dir = dir
	n.cmd.Stdout, n.cmd.Stderr = n.output, n.output
	if err := n.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start nsqd: %w", err)
	}
	go func() {
		n.err = n.cmd.Wait()
		close(n.done)
	}()
	if err := n.await(); err != nil {
		return nil, errors.Join(err, n.kill(), errors.New(n.output.tail()))
	}
	return n, nil
}

// await returns when the nsqd answers, if only that HTTP must not be used.
func (n *node) await() error {
	for range ticks(patience) {
		select {
		case <-n.done:
			return fmt.Errorf("nsqd %q ended at once: %w", n.flags, n.err)
		default:
		}
		if _, err := fetch(http.MethodGet, "http://"+n.http+"/ping", nil); err == nil {
			select {
			case <-n.done: // it was another that answered
			default:
				return nil
			}
		}
	}
	return fmt.Errorf("nsqd %q does not answer", n.flags)
}

// end stops the process in good order. It fails when it does not stop, or not
// with exit code 0, as after a data race.
func (n *node) end() error {
	select {
	case <-n.done:
		return nil // a case ended it and judged that itself
	default:
	}
	if err := n.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return fmt.Errorf("SIGTERM: %w", err)
	}
	select {
	case <-n.done:
		// Upstream's answers before it minds signals.
		if n.err != nil && (under.srtm || n.err.Error() != "signal: terminated") {
			return fmt.Errorf("exit after SIGTERM: %w; it printed last:\n%s", n.err, n.output.tail())
		}
		return nil
	case <-time.After(patience + 15*time.Second):
		return errors.Join(errors.New("nsqd does not end after SIGTERM"), n.kill())
	}
}

// kill ends the process at once.
func (n *node) kill() error {
	err := n.cmd.Process.Kill()
	<-n.done
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}

// ports hands out ports, each once: between its choice and its use a port
// belongs to nobody. It stays below those that the system gives to outgoing
// connections.
var ports struct {
	mu struct {
		sync.Mutex
		last int
	}
}

// freePorts returns so many loopback addresses that nobody listens on.
func freePorts(count int) ([]string, error) {
	const first, last = 10_000, 30_000
	ports.mu.Lock()
	defer ports.mu.Unlock()
	if ports.mu.last == 0 {
		ports.mu.last = first + os.Getpid()*101%(last-first)
	}
	var addresses []string
	var errs []error
	for len(addresses) < count {
		if ports.mu.last++; ports.mu.last >= last {
			ports.mu.last = first
		}
		address := fmt.Sprintf("127.0.0.1:%d", ports.mu.last)
		ln, err := net.Listen("tcp", address)
		if err != nil {
			if errs = append(errs, err); len(errs) > 100 {
				return nil, errors.Join(errs...)
			}
			continue
		}
		if err := ln.Close(); err != nil {
			return nil, err
		}
		addresses = append(addresses, address)
	}
	return addresses, nil
}

// topics counts the topics of this process.
var topics atomic.Int64

// birth tells the topics of this process from those of one before, on an nsqd
// that outlives both.
var birth = time.Now().UnixMilli()

// topic returns a topic's name that no other case uses.
func (n *node) topic() string {
	return fmt.Sprintf("t%d-%d", birth, topics.Add(1))
}

// ticks yields at once and then every few milliseconds until within is over.
func ticks(within time.Duration) func(func(int) bool) {
	return func(yield func(int) bool) {
		ticker := time.NewTicker(5 * time.Millisecond)
		defer ticker.Stop()
		for end, i := time.Now().Add(within), 0; time.Now().Before(end); i++ {
			if !yield(i) {
				return
			}
			<-ticker.C
		}
	}
}

// eventually asks until problem returns "", or fails with its last answer.
func eventually(t *testing.T, problem func() string) {
	t.Helper()
	last := ""
	for range ticks(patience) {
		if last = problem(); last == "" {
			return
		}
	}
	t.Fatalf("still after %v: %s", patience, last)
}
