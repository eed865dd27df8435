package testkit

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// Namespace is a network namespace that ends with its test: a separate machine from the
// network's view.
type Namespace struct {
	Name string
	t    testing.TB
}

var namespaces atomic.Int64

// NewNamespace makes a namespace with loopback up. It skips the test without the
// permission.
func NewNamespace(t testing.TB) Namespace {
	t.Helper()
	if _, err := exec.LookPath("ip"); err != nil || os.Getuid() != 0 {
		t.Skip("network namespaces take root, and ip of iproute2")
	}
	n := Namespace{fmt.Sprintf("srtm-%d-%d", os.Getpid(), namespaces.Add(1)), t}
	if out, err := exec.Command("ip", "netns", "add", n.Name).CombinedOutput(); err != nil {
		t.Skipf("no network namespace can be made here: %v\n%s", err, out)
	}
	t.Cleanup(func() { IP(t, "netns", "del", n.Name) })
	n.IP("link", "set", "lo", "up")
	return n
}

// IP runs ip(8) in the namespace.
func (n Namespace) IP(args ...string) {
	n.t.Helper()
	IP(n.t, append([]string{"-n", n.Name}, args...)...)
}

// IP runs ip(8).
func IP(t testing.TB, args ...string) {
	t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		t.Fatalf("ip %v: %v\n%s", args, err, out)
	}
}

// Inside runs f in the namespace: sockets that f opens, and processes that f starts, stay
// there. If f ends its test, the caller ends too.
func (n Namespace) Inside(f func()) {
	n.t.Helper()
	returned, ended := false, make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // the thread ends with this goroutine
		target, err := os.Open("/run/netns/" + n.Name)
		if err == nil {
			err = unix.Setns(int(target.Fd()), unix.CLONE_NEWNET)
			target.Close()
		}
		if err != nil {
			n.t.Errorf("enter namespace %s: %v", n.Name, err)
			return
		}
		f()
		returned = true
	}()
	if <-ended; !returned {
		runtime.Goexit()
	}
}
