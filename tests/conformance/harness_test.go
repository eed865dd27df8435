package conformance

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
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
// Cases run in parallel, each with its own topics. Cases wait for time to pass only in reads with a
// deadline: patience, for events that must come.

const (
	patience = local.Patience
	// silence is how long to listen for a message that must not come. A silence that is too short can
	// only miss a fault, never report one.
	silence = 150 * time.Millisecond
)

// group begins a test function that consists of cases.
func group(t *testing.T) {
	t.Helper()
	t.Parallel()
}

// check runs a case, beside all others.
func check(t *testing.T, name string, f func(t *testing.T)) {
	t.Helper()
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		f(t)
	})
}

// node is a running nsqd.
type node struct {
	tcp, http string         // addresses
	process   *local.Process // nil: the test must not stop it
}

// commons are the nsqd with default flags and its folders.
var commons shared

type shared struct {
	mu struct {
		sync.Mutex
		node *node
		err  error
	}
}

// common returns the nsqd shared by all cases that need no flags.
func common(t *testing.T) *node {
	t.Helper()
	s := &commons
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.node == nil && s.mu.err == nil {
		s.mu.node, s.mu.err = s.make(t)
	}
	if s.mu.err != nil {
		t.Fatal(s.mu.err)
	}
	n := s.mu.node
	t.Cleanup(func() {
		if t.Failed() && n.process != nil {
			select {
			case <-n.process.Done():
				t.Logf("nsqd has ended (%v) and printed last:\n%s", n.process.Err(), n.process.Output())
			default:
			}
		}
	})
	return n
}

func (s *shared) make(t *testing.T) (*node, error) {
	if under.tcp != "" {
		return &node{tcp: under.tcp, http: under.http}, nil
	}
	dir, err := os.MkdirTemp("", "conformance")
	if err != nil {
		return nil, err
	}
	return launch(program(t), dir, nil)
}

func (s *shared) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.mu.node
	if n == nil || n.process == nil {
		return nil
	}
	return errors.Join(n.end(), os.RemoveAll(n.process.Dir))
}

// start runs an nsqd with these flags as long as t lasts. It skips t if the nsqd under test runs
// already.
func start(t *testing.T, flags ...string) *node {
	t.Helper()
	return startIn(t, t.TempDir(), flags...)
}

// startIn is start in a folder that may hold data of another nsqd.
func startIn(t *testing.T, dir string, flags ...string) *node {
	t.Helper()
	n, err := launch(program(t, flags...), dir, flags)
	testkit.Must(t, err)
	t.Cleanup(func() {
		if err := n.end(); err != nil {
			t.Errorf("stop nsqd: %v", err)
		}
		if t.Failed() {
			t.Logf("nsqd %q printed last:\n%s", flags, n.process.Output())
		}
	})
	return n
}

func launch(binary, dir string, flags []string) (*node, error) {
	d, err := local.NSQD(binary, dir, flags...)
	if err != nil {
		return nil, err
	}
	return &node{tcp: d.TCP, http: d.HTTP, process: d}, nil
}

// end stops the process in good order.
func (n *node) end() error {
	err := n.process.Stop()
	var exit *exec.ExitError
	if !under.srtm && errors.As(err, &exit) && exit.String() == "signal: terminated" {
		return nil // upstream's nsqd answers before it handles signals
	}
	return err
}

// topics counts the topics of this process.
var topics atomic.Int64

// birth distinguishes the topics of this process from topics of an earlier process, on an nsqd that
// outlives both.
var birth = time.Now().UnixMilli()

// topic returns a topic name that no other case uses.
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
