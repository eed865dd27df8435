package hook

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/stamp"
)

// The numbers of capabilities are the kernel's ABI.
const (
	capSysAdmin = 21
	capPerfmon  = 38
	capBPF      = 39
)

const pinEnv = "SRTM_HOOK_PIN"

func init() {
	children["unprivileged"] = childUnprivileged
	children["bpf only"] = childBPFOnly
	children["bpf and perfmon"] = childBPFAndPerfmon
	children["pinned"] = childPinned
	children["time namespace"] = childTimeNamespace
}

// child runs this binary as the named child. The process has only the privileges caps, unless its user is root.
func child(t *testing.T, name string, uid uint32, caps []uintptr, wrap []string, env ...string) {
	t.Helper()
	argv := append(wrap, "/proc/self/exe")
	if len(wrap) > 0 { // with a wrapper, /proc/self is another program
		self := testkit.Result(os.Executable()).Must(t)
		argv[len(wrap)] = self
	}
	cmd := exec.CommandContext(t.Context(), argv[0], argv[1:]...)
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), append(env, childEnv+"="+name, "GOCOVERDIR="+os.TempDir(), "GORACE=atexit_sleep_ms=0")...)
	if uid != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}, AmbientCaps: caps}
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%s: %v\n%s", name, err, out)
	}
}

const nobody = 65534

func needRoot(t *testing.T) {
	t.Helper()
	needKernel(t)
	if os.Geteuid() != 0 {
		t.Skip("needs root, to become another user")
	}
}

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

func TestUnprivilegedFallsBack(t *testing.T) {
	needRoot(t)
	if text, err := os.ReadFile("/proc/sys/kernel/unprivileged_bpf_disabled"); err != nil || strings.TrimSpace(string(text)) == "0" {
		t.Skipf("any user may load programs here (%q, %v)", text, err)
	}
	child(t, "unprivileged", nobody, nil, nil)
}

func childUnprivileged() error {
	if s, err := Open(EBPF, Config{}, discard()); err == nil || !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("mode ebpf: %v, %v, want a permission error", s, err)
	}
	s, err := Open(Auto, Config{}, discard())
	if err != nil {
		return err
	}
	in := s.Info()
	if in.Source != "sotimestamp" || !strings.Contains(in.Reason, "operation not permitted") || strings.Contains(in.Reason, "\n") {
		return fmt.Errorf("mode auto: %+v", in)
	}
	return errors.Join(selfTest(s.src, stamp.UpperBound), s.Close())
}

func TestFewerPrivilegesSuffice(t *testing.T) {
	needRoot(t)
	child(t, "bpf and perfmon", nobody, []uintptr{capBPF, capPerfmon}, nil)
	if major, minor := kernelVersion(t); major < 6 {
		t.Skipf("whether CAP_BPF alone suffices depends on the verifier; not known for %d.%d", major, minor)
	}
	child(t, "bpf only", nobody, []uintptr{capBPF}, nil)
}

func childBPFAndPerfmon() error {
	s, err := Open(EBPF, Config{}, discard())
	if err != nil {
		return err
	}
	if in := s.Info(); in.Reason != "" {
		return fmt.Errorf("%+v", in)
	}
	return errors.Join(selfTest(s.src, stamp.Exact), s.Close())
}

func childBPFOnly() error {
	s, err := Open(EBPF, Config{}, discard())
	if err != nil {
		return err
	}
	if in := s.Info(); !strings.Contains(in.Reason, "worked out in user space") {
		return fmt.Errorf("%+v", in)
	}
	return errors.Join(selfTest(s.src, stamp.Exact), s.Close())
}

// bpffs mounts a BPF file system that all users can reach.
func bpffs(t *testing.T) string {
	t.Helper()
	dir := testkit.Result(os.MkdirTemp("", "hook")).Must(t)
	t.Cleanup(func() {
		testkit.NoError(t, os.Remove(dir))
	})
	testkit.Must(t, unix.Mount("bpf", dir, "bpf", 0, "mode=0711"))
	t.Cleanup(func() {
		testkit.NoError(t, unix.Unmount(dir, 0))
	})
	testkit.Must(t, os.Chmod(dir, 0o711))
	return dir
}

func TestPinnedProgramNeedsNoPrivileges(t *testing.T) {
	needRoot(t)
	if major, minor := kernelVersion(t); major < 5 || major == 5 && minor < 19 {
		t.Skipf("before Linux 5.19 pinned maps need CAP_BPF; this is %d.%d", major, minor)
	}
	dir := filepath.Join(bpffs(t), "srtm")
	cfg := Config{MaxConns: 300, RingRecords: 64}
	testkit.Must(t, Pin(dir, nobody, nobody, cfg))
	if err := Pin(dir, nobody, nobody, cfg); err != nil {
		t.Fatalf("again: %v", err)
	}
	child(t, "pinned", nobody, nil, nil, pinEnv+"="+dir)
}

func childPinned() error {
	cfg := Config{PinDir: os.Getenv(pinEnv)}
	s, err := Open(EBPF, cfg, discard())
	if err != nil {
		return err
	}
	in := s.Info()
	if !in.Pinned || in.Reason != "" || in.Counters.RingsMost != 300 || in.Counters.SegmentsEarly > 2 {
		return fmt.Errorf("%+v", in)
	}
	if f := s.src.(*filter); f.slots.records != 64 {
		return fmt.Errorf("%d records per ring, want the 64 that were pinned", f.slots.records)
	}
	if second, err := Open(EBPF, cfg, discard()); err == nil || !strings.Contains(err.Error(), "in use by another process") {
		return fmt.Errorf("a second time: %v, %v", second, err)
	}
	// A connection that another process left must not disturb the next process.
	client, server, err := loopback(s, time.Now().Add(testPatience))
	if err != nil {
		return err
	}
	c := s.Track(server)
	if _, err := client.Write([]byte("hello")); err != nil {
		return err
	}
	if _, err := c.Read(make([]byte, 5)); err != nil {
		return err
	}
	if a := c.Arrival(0, 5); a.Source != stamp.Exact {
		return fmt.Errorf("%+v", a)
	}
	if err := s.Close(); err == nil {
		return errors.New("close with a connection left: no error")
	}
	if s, err = Open(EBPF, cfg, discard()); err != nil {
		return fmt.Errorf("after a crash: %w", err)
	}
	var cookie uint64
	var slot uint32
	if left := s.src.(*filter).conns.Iterate(); left.Next(&cookie, &slot) {
		return fmt.Errorf("connection %d is left with slot %d", cookie, slot)
	}
	// All slots can be used, over several windows with a mapping each.
	f := s.src.(*filter)
	for i := range 299 { // one slot rests after the self-test of this process
		_, mem, err := f.slots.acquire(1 << 62)
		if err != nil {
			return fmt.Errorf("slot %d: %w (%v)", i, err, f.slots.mu.failure)
		}
		r := newRing(mem, 0)
		r.reset(uint64(i))
	}
	return nil
}

func TestPinSaysWhatIsWrong(t *testing.T) {
	needRoot(t)
	testkit.ErrorHas(t, Pin(t.TempDir(), 0, 0, Config{}), "not in a bpffs", "outside a bpffs")
	testkit.ErrorHas(t, Pin(t.TempDir(), 0, 0, Config{RingRecords: 3}), "power of two", "bad config")
	if s, err := Open(EBPF, Config{PinDir: filepath.Join(t.TempDir(), "none")}, discard()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no directory: %v, %v", s, err)
	}
	if s, err := Open(EBPF, Config{PinDir: t.TempDir()}, discard()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("empty directory: %v, %v", s, err)
	}
}

// In a time namespace the program's clock differs from ours.
func TestTimeNamespaceIsAllowedFor(t *testing.T) {
	needRoot(t)
	if _, err := os.Stat("/proc/self/ns/time"); err != nil {
		t.Skipf("this kernel has no time namespaces: %v", err)
	}
	unshare, err := exec.LookPath("unshare")
	if err != nil {
		t.Skipf("needs unshare of util-linux: %v", err)
	}
	child(t, "time namespace", 0, nil, []string{unshare, "--time", "--monotonic", "1000", "--fork"})
}

func childTimeNamespace() error {
	s, err := Open(EBPF, Config{}, discard())
	if err != nil {
		return err
	}
	if f := s.src.(*filter); f.shift != 1000e9 {
		return fmt.Errorf("the clocks are %d ns apart, want 1000 s", f.shift)
	}
	return errors.Join(selfTest(s.src, stamp.Exact), s.Close())
}

// The stamper reads a connection that the kernel cannot stamp.
func TestConnectionsWithoutASocketAreRead(t *testing.T) {
	s, _ := loaded(t, false, Config{})
	client, server := net.Pipe()
	defer client.Close()
	defer server.Close()
	c := s.Track(server)
	sent := make(chan error, 1)
	go func() {
		_, err := client.Write(message(10))
		sent <- err
	}()
	if a := take(t, c, 10); a.Source != stamp.Read {
		t.Errorf("%+v", a)
	}
	testkit.NoError(t, <-sent)
	testkit.Equal(t, s.Info().Counters.ConnsRefused, 1, "connections refused")
}
