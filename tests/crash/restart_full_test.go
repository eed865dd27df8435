package crash

import (
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// takeAll adds a file that takes the disk's last blocks.
func takeAll(t *testing.T, dir string) {
	t.Helper()
	f := testkit.Result(os.CreateTemp(dir, "foreign")).Must(t)
	for _, size := range []int{64 << 10, 4 << 10, 100} {
		for err := error(nil); err == nil; {
			_, err = f.Write(make([]byte, size))
		}
	}
	testkit.Must(t, f.Close())
}

// onSmallDisk starts a broker on the disk.
func onSmallDisk(t *testing.T, dir, flag string) *local.Process {
	t.Helper()
	d := testkit.Result(local.NSQD(localtest.Program(t, "nsqd"), t.TempDir(), "--data-path="+dir, "--mem-queue-size=10", "--max-bytes-per-file=100000", flag)).Must(t)
	t.Cleanup(func() { _ = d.Kill() })
	return d
}

// well waits until the disk is healthy and the broker accepts a message.
func (p *filler) well(d *local.Process) {
	p.t.Helper()
	health, answer := "", ""
	p.t.Cleanup(func() {
		if p.t.Failed() {
			depth, _, _ := localtest.Ask(http.MethodGet, "http://"+d.HTTP+"/stats?format=json", "")
			p.t.Logf("health %q, last answer %q, %s\n%s", health, answer, depth, d.AllOutput())
		}
	})
	testkit.WaitFor(p.t, "well, and accepting", func() bool {
		var code int
		if code, health = ask(p.t, "http://"+d.HTTP+"/ping", ""); code == http.StatusOK {
			answer = p.publish()
		}
		return answer == "OK"
	})
}

// A broker that ends on a full disk starts on the full disk, although another program's file has taken
// the last blocks. The broker delivers each stored message, finished messages free the disk, and the
// broker accepts messages again. Only messages that were never stored are lost, with --durability=memory.
func TestRestartOnAFullDisk(t *testing.T) {
	for _, flag := range []string{"--durability=memory", "--durability=fsync", "--mem-queue-size=0"} {
		for _, end := range []string{"kill", "term"} {
			t.Run(flag+"/"+end, func(t *testing.T) {
				dir := testkit.SmallDisk(t, 1<<20)
				d := onSmallDisk(t, dir, flag)
				ask(t, "http://"+d.HTTP+"/topic/create?topic=t", "x")
				ask(t, "http://"+d.HTTP+"/channel/create?topic=t&channel=c", "x")
				p := &filler{t: t}
				p.connect(d.TCP)
				p.until("E_QUEUE_FULL", 5000)
				takeAll(t, dir)
				testkit.Must(t, p.nc.Close())
				stored := 0
				for i := range 3 {
					var stopped error
					if end == "kill" {
						kill(t, d)
					} else {
						stopped = d.Stop()
					}
					last := d
					d = onSmallDisk(t, dir, flag)
					depth := channel(t, d).unfinished
					lost := len(p.accepted) - depth
					switch {
					case i > 0:
						testkit.Equal(t, depth, stored, "messages after another start")
						testkit.NoError(t, stopped)
					case flag != "--durability=memory":
						testkit.Equal(t, lost, 0, "lost messages")
						testkit.NoError(t, stopped)
					case end == "term":
						if stopped == nil || !strings.Contains(last.AllOutput(), "topic t has lost "+plural.Count(lost, "message")+": ") {
							t.Errorf("%d messages lost; %v", lost, stopped)
						}
					}
					stored = depth
				}
				p.connect(d.TCP)
				defer p.nc.Close()
				if got := p.collect(d.TCP, stored); !slices.Equal(got, p.accepted[:stored]) {
					t.Errorf("%d stored, %d of them delivered", stored, stored-missing(p.accepted[:stored], got))
				}
				p.well(d)
				testkit.NoError(t, d.Stop())
			})
		}
	}
}

// On a disk that others keep full, messages that a channel has finished do not come again after a
// restart, although the messages share a file with unfinished ones.
func TestFinishedMessagesAreRecordedOnAFullDisk(t *testing.T) {
	const messages, part = 50, 10
	for _, flag := range []string{"--durability=memory", "--durability=fsync", "--mem-queue-size=0"} {
		t.Run(flag, func(t *testing.T) {
			dir := testkit.SmallDisk(t, 1<<20)
			d := onSmallDisk(t, dir, flag)
			ask(t, "http://"+d.HTTP+"/topic/create?topic=t", "x")
			ask(t, "http://"+d.HTTP+"/channel/create?topic=t&channel=c", "x")
			p := &filler{t: t}
			p.connect(d.TCP)
			for range messages {
				testkit.MustEqual(t, p.publish(), "OK", "on an empty disk")
			}
			testkit.Must(t, p.nc.Close())
			testkit.Must(t, d.Stop())
			for left := messages - part; left >= 0; left -= part {
				takeAll(t, dir)
				d = onSmallDisk(t, dir, flag)
				p.collect(d.TCP, part)
				testkit.WaitFor(t, "a part is finished", func() bool { s := channel(t, d); return s.Depth == left && s.InFlight == 0 })
				testkit.NoError(t, d.Stop())
				if left > 0 { // otherwise the log is removed, and its blocks are free
					takeAll(t, dir)
				}
				d = onSmallDisk(t, dir, flag)
				testkit.Equal(t, channel(t, d).unfinished, left, "unfinished messages after a restart")
				testkit.NoError(t, d.Stop())
			}
			d = onSmallDisk(t, dir, flag)
			p.connect(d.TCP)
			defer p.nc.Close()
			p.well(d)
			testkit.NoError(t, d.Stop())
		})
	}
}

// A broker with an empty folder starts on a full disk, and works when the disk has room.
func TestFirstStartOnAFullDisk(t *testing.T) {
	for _, flag := range []string{"--durability=memory", "--durability=fsync"} {
		t.Run(flag, func(t *testing.T) {
			dir := testkit.SmallDisk(t, 1<<20)
			takeAll(t, dir)
			d := onSmallDisk(t, dir, flag)
			p := &filler{t: t}
			p.connect(d.TCP)
			defer p.nc.Close()
			if code, _ := ask(t, "http://"+d.HTTP+"/topic/create?topic=t", "x"); code != http.StatusServiceUnavailable {
				t.Errorf("create a topic: %d", code)
			}
			files := testkit.Result(filepath.Glob(filepath.Join(dir, "foreign*"))).Must(t)
			for _, file := range files {
				testkit.Must(t, os.Remove(file))
			}
			testkit.WaitFor(t, "a topic", func() bool {
				code, _ := ask(t, "http://"+d.HTTP+"/topic/create?topic=t", "x")
				return code == http.StatusOK
			})
			p.well(d)
			testkit.NoError(t, d.Stop())
		})
	}
}
