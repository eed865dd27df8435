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

// defaultLimit is the soft limit of a process that is given none: three quarters of
// what the machine, or its cgroup, has. The rest is for what the Go runtime does
// not count: kernel memory of sockets and arrival stamps, and the cache of the
// files of messages. root is the file system's; 0: it does not tell.
func defaultLimit(root fs.FS) int64 {
	has := min(total(root), cgroups(root))
	if has == math.MaxInt64 {
		return 0
	}
	return has / 4 * 3
}

// total is the memory of the machine, in bytes; math.MaxInt64: unknown.
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

// cgroups is the lowest limit of the cgroup and all those that it is in;
// math.MaxInt64: none.
func cgroups(root fs.FS) int64 {
	lowest := int64(math.MaxInt64)
	text, err := fs.ReadFile(root, "proc/self/cgroup")
	if err != nil {
		return lowest
	}
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		// number:controllers:path; without controllers it is that of version 2.
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
		// In a container the path may be the host's: then the mount is its cgroup.
		for at := path.Clean("/" + parts[2]); ; at = path.Dir(at) {
			lowest = min(lowest, limitOf(root, path.Join(mount, at, file)))
			if at == "/" {
				break
			}
		}
	}
	return lowest
}

// limitOf reads one limit; math.MaxInt64 where there is none ("max", or in
// version 1 a number near that).
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

// startTime is after which starting is over.
const startTime = time.Second

// forgetProgram gives back what of the program itself is resident, on Linux: starting
// has touched most of its code and its tables, which serving needs few of. They are
// clean pages of a file; what is used again comes back from the system's cache.
func forgetProgram(path string) error {
	f, err := elf.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if f.Type != elf.ET_EXEC { // what is relocated is not as the file has it
		return nil
	}
	page := uint64(unix.Getpagesize())
	for _, p := range f.Progs {
		if p.Type != elf.PT_LOAD || p.Flags&elf.PF_W != 0 {
			continue
		}
		at := p.Vaddr / page * page
		if _, _, errno := unix.Syscall(unix.SYS_MADVISE, uintptr(at), uintptr(p.Vaddr+p.Filesz-at), unix.MADV_DONTNEED); errno != 0 {
			return errno
		}
	}
	return nil
}
