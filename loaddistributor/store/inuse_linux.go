package store

import (
	"fmt"
	"os"
	"strings"
	"syscall"
)

// lockOwner describes the process that has locked a file, as far as the kernel reports.
func lockOwner(path string) string {
	const unknown = "another process"
	info, err := os.Stat(path)
	if err != nil {
		return unknown
	}
	s, ok := info.Sys().(*syscall.Stat_t)
	locks, err := os.ReadFile("/proc/locks")
	if !ok || err != nil {
		return unknown
	}
	for line := range strings.Lines(string(locks)) {
		// number, FLOCK, ADVISORY, WRITE, process, major:minor:inode, from, to
		f := strings.Fields(line)
		if len(f) < 6 || f[1] != "FLOCK" || !strings.HasSuffix(f[5], fmt.Sprintf(":%d", s.Ino)) || f[4] == "0" {
			continue
		}
		if name, err := os.ReadFile("/proc/" + f[4] + "/comm"); err == nil {
			return fmt.Sprintf("process %s (%s)", f[4], strings.TrimSpace(string(name)))
		}
	}
	return unknown
}
