package faults

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
)

// Two adaptors on purpose, in separate processes. The first adaptor is stopped, and the
// loaddistributor and two of three brokers connect to a second adaptor in its place. Then the first
// adaptor continues, with the third broker still in its session. The two leaving brokers are strict:
// the first adaptor, without news of them for long, regards their shares as over. Without a fence the
// first adaptor would give these shares to the third broker, while the second adaptor lets the two
// brokers keep the shares.
func TestTwoAdaptorsOfTheirOwn(t *testing.T) {
	c := newCluster(t, true, []string{"--flex-lease=3s", "--session-lease=4s", "--clock-bound=50ms"}, "strict", "strict", "available")
	create, cancel := context.WithTimeout(t.Context(), local.Patience)
	defer cancel()
	c.create(create)
	_, stop := c.load(offered/3, offered/3, offered/3)
	testkit.WaitFor(c.t, "brokers have their shares", func() bool { return whole(c.shares(), 3) })

	rateOf := func(b *broker) int64 {
		s := testkit.Result(b.state()).Must(t)
		return held(s).RateMilli
	}
	free, err := local.Ports(2)
	c.must(err)
	c.second = c.startAdaptorAt(free[0], free[1])
	staying := ports(t, c.brokers[2].process.Pid())
	c.must(c.adaptor.Signal(syscall.SIGSTOP))
	c.link.Retarget(free[0])
	c.link.Drop(func(port int) bool { return !staying[port] })
	testkit.WaitFor(c.t, "two brokers follow the second", func() bool {
		for _, b := range c.brokers[:2] {
			if s, err := b.state(); err != nil || !s.Grants.Connected {
				return false
			}
		}
		return true
	})
	c.must(c.adaptor.Signal(syscall.SIGCONT))
	testkit.WaitFor(c.t, "the third follows, or is given what the two have", func() bool {
		return whole(c.shares(), 3) || rateOf(c.brokers[2]) > rate*1000*2/3
	})
	t.Logf("brokers hold %d, %d and %d of %d thousandths of a message per second", rateOf(c.brokers[0]), rateOf(c.brokers[1]), rateOf(c.brokers[2]), rate*1000)
	c.flows(3 * rate)
	c.verify(stop(), fixed())
}

// ports returns the local ports of a process' TCP connections; an ended process has none.
func ports(t *testing.T, pid int) map[int]bool {
	t.Helper()
	if _, err := os.Stat("/proc/self/fd"); err != nil {
		t.Skipf("whose connection is which is not known here: %v", err)
	}
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	testkit.Must(t, err)
	own := map[string]bool{}
	for _, f := range files {
		if link, err := os.Readlink(f); err == nil {
			own[strings.TrimSuffix(strings.TrimPrefix(link, "socket:["), "]")] = true
		}
	}
	table, err := os.ReadFile("/proc/net/tcp")
	if err != nil {
		t.Skip(err)
	}
	set := map[int]bool{}
	for line := range strings.Lines(string(table)) {
		var port int
		if f := strings.Fields(line); len(f) > 9 && own[f[9]] {
			if _, err := fmt.Sscanf(f[1][strings.IndexByte(f[1], ':')+1:], "%X", &port); err == nil {
				set[port] = true
			}
		}
	}
	return set
}
