package main

import (
	"os"
	"runtime"
	"testing"
	"testing/fstest"

	"github.com/prometheus/procfs"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestDefaultIsThreeQuartersOfWhatThereIs(t *testing.T) {
	const meminfo = "MemTotal:        8000000 kB\nMemFree:          100 kB\n"
	for name, c := range map[string]struct {
		files map[string]string
		want  int64
	}{
		"nothing is known":       {nil, 0},
		"a machine":              {map[string]string{"proc/meminfo": meminfo}, 8_000_000 << 10 / 4 * 3},
		"nonsense":               {map[string]string{"proc/meminfo": "MemTotal: many kB\n", "proc/self/cgroup": "what\n0:memory\n"}, 0},
		"a cgroup without limit": {map[string]string{"proc/meminfo": meminfo, "proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"}, 8_000_000 << 10 / 4 * 3},
		"a cgroup":               {map[string]string{"proc/meminfo": meminfo, "proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "400000\n"}, 300_000},
		"the cgroup's parent":    {map[string]string{"proc/meminfo": meminfo, "proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "400000\n", "sys/fs/cgroup/a/memory.max": "4000\n"}, 3000},
		"in a container":         {map[string]string{"proc/meminfo": meminfo, "proc/self/cgroup": "0::/../host\n", "sys/fs/cgroup/memory.max": "4000\n"}, 3000},
		"version 1":              {map[string]string{"proc/meminfo": meminfo, "proc/self/cgroup": "5:cpu:/c\n4:memory:/m\n", "sys/fs/cgroup/memory/m/memory.limit_in_bytes": "4000\n"}, 3000},
		"version 1, no limit":    {map[string]string{"proc/meminfo": meminfo, "proc/self/cgroup": "4:memory:/m\n", "sys/fs/cgroup/memory/m/memory.limit_in_bytes": "9223372036854771712\n"}, 8_000_000 << 10 / 4 * 3},
		"more than the machine":  {map[string]string{"proc/meminfo": meminfo, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "80000000000\n"}, 8_000_000 << 10 / 4 * 3},
	} {
		root := fstest.MapFS{}
		for path, text := range c.files {
			root[path] = &fstest.MapFile{Data: []byte(text)}
		}
		testkit.Equal(t, defaultLimit(root), c.want, "%s", name)
	}
}

func TestDefaultOfThisMachine(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("only Linux has files with the size of the memory")
	}
	if got := defaultLimit(os.DirFS("/")); got < 1<<20 {
		t.Errorf("%d bytes", got)
	}
}

// Most of a program's pages are used only at its start.
func TestProgramThatHasStartedIsNotResident(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("there is no /proc")
	}
	resident := func() uint64 {
		self := testkit.Result(procfs.Self()).Must(t)
		status := testkit.Result(self.NewStatus()).Must(t)
		return status.RssFile
	}
	before := resident()
	testkit.Must(t, forgetProgram("/proc/self/exe"))
	if after := resident(); after > before/4*3 {
		t.Errorf("%d bytes of files are resident, of %d before: want at most three quarters", after, before)
	}
	if err := forgetProgram("/proc/none"); err == nil {
		t.Error("no error for a program that is not there")
	}
}
