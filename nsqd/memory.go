package main

import (
	"bufio"
	"bytes"
	"debug/elf"
	"io/fs"
	"math"
	"path"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// defaultLimit returns the default soft limit of memory: three quarters of the memory of the machine or
// of the cgroup. The rest is for memory that the Go runtime does not count: kernel memory of sockets
// and of arrival stamps, and the cache of message files. root is the root of the file system. 0:
// unknown.
func defaultLimit(root fs.FS) int64 {
	memory := min(total(root), cgroups(root))
	if memory == math.MaxInt64 {
		return 0
	}
	return memory / 4 * 3
}

// total returns the memory of the machine in bytes; math.MaxInt64: unknown.
func total(root fs.FS) int64 {
	text, err := fs.ReadFile(root, "proc/meminfo")
	if err != nil {
		return math.MaxInt64
	}
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		if rest, ok := strings.CutPrefix(lines.Text(), "MemTotal:"); ok {
			kib, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(rest, " kB")), 10, 64)
			if err == nil && kib > 0 && kib < math.MaxInt64>>10 {
				return kib << 10
			}
		}
	}
	return math.MaxInt64
}

// cgroups returns the lowest memory limit of the process's cgroup and its ancestors; math.MaxInt64:
// none.
func cgroups(root fs.FS) int64 {
	lowest := int64(math.MaxInt64)
	text, err := fs.ReadFile(root, "proc/self/cgroup")
	if err != nil {
		return lowest
	}
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		// number:controllers:path; without controllers the line is for cgroup version 2.
		parts := strings.SplitN(lines.Text(), ":", 3)
		if len(parts) < 3 {
			continue
		}
		mount, file := "sys/fs/cgroup", "memory.max"
		switch parts[1] {
		case "":
		case "memory":
			mount, file = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
		default:
			continue
		}
		// In a container path may be the host's path. Then the root of the mount is the process's
		// cgroup.
		for dir := path.Clean("/" + parts[2]); ; dir = path.Dir(dir) {
			lowest = min(lowest, limitOf(root, path.Join(mount, dir, file)))
			if dir == "/" {
				break
			}
		}
	}
	return lowest
}

// limitOf reads a limit; math.MaxInt64: none. No limit reads "max", or in version 1 a number near
// math.MaxInt64.
func limitOf(root fs.FS, name string) int64 {
	text, err := fs.ReadFile(root, name)
	if err != nil {
		return math.MaxInt64
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	if err != nil || n <= 0 {
		return math.MaxInt64
	}
	return n
}

// startTime is how long starting takes at most.
const startTime = time.Second

// forgetProgram releases the resident pages of the program's code and tables, on Linux. Starting
// touches most of these pages; serving needs few. The pages are clean pages of a file, so the page
// cache restores the pages that are used again.
func forgetProgram(path string) error {
	f, err := elf.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if f.Type != elf.ET_EXEC { // relocated pages differ from the file
		return nil
	}
	page := uint64(unix.Getpagesize())
	for _, p := range f.Progs {
		if p.Type != elf.PT_LOAD || p.Flags&elf.PF_W != 0 {
			continue
		}
		start := p.Vaddr / page * page
		if _, _, errno := unix.Syscall(unix.SYS_MADVISE, uintptr(start), uintptr(p.Vaddr+p.Filesz-start), unix.MADV_DONTNEED); errno != 0 {
			return errno
		}
	}
	return nil
}
