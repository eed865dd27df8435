package main

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"
)

const (
	minFiles   = 10_000  // minimum for a daemon
	minSpace   = 1 << 30 // bytes
	minFree    = 0.05    // of a disk
	capPerfmon = 1 << 38 // bits of CapEff
	capBPF     = 1 << 39
	capAdmin   = 1 << 21
	bpfKernel  = "5.8"  // first with CAP_BPF
	accounting = "5.11" // first to charge BPF memory to the cgroup instead of memlock
)

// daemons are the programs to check, and ports their default ports.
var (
	daemons = []string{"nsqd", "loaddistributor", "tbadaptor", "admission", "gateway"}
	ports   = []struct {
		port int
		use  string
	}{
		{1883, "nsqd, MQTT"}, {8883, "nsqd, MQTT over TLS"}, {4150, "nsqd, NSQ"}, {4151, "nsqd, HTTP"}, {4160, "loaddistributor, NSQ's registration"}, {4161, "loaddistributor, HTTP"},
		{4170, "loaddistributor, gRPC"}, {4180, "tbadaptor, gRPC"}, {4181, "tbadaptor, HTTP"},
		{4190, "srtm agent, HTTP"}, {4191, "admission, HTTP"}, {4192, "admission, gRPC"}, {4195, "gateway, HTTP"}, {4196, "gateway, operators"},
	}
)

func (d *doctor) machine() {
	release := ""
	var name unix.Utsname
	if err := unix.Uname(&name); err == nil {
		release = unix.ByteSliceToString(name.Release[:])
	}
	if atLeast(release, bpfKernel) {
		d.add("kernel", stateOK, "", "Linux %s", release)
	} else {
		d.add("kernel", warned, "use Linux "+bpfKernel+" or later for arrival stamps by BPF; nsqd works without", "Linux %s", release)
	}
	d.bpf()
	var files, memory unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &files) == nil {
		d.files("open files of this shell", files.Cur)
	}
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &memory) == nil && !atLeast(release, accounting) && memory.Cur < 64<<20 {
		d.add("locked memory", warned, "LimitMEMLOCK=64M: before Linux "+accounting+" BPF's memory counts for it", "%d KiB", memory.Cur>>10)
	} else {
		d.add("locked memory", stateOK, "", "enough for BPF")
	}
	var state unix.Timex
	switch code, err := unix.Adjtimex(&state); {
	case err != nil:
		d.add("clock", skipped, "", "the kernel does not say: %v", err)
	case code == unix.TIME_ERROR || state.Status&unix.STA_UNSYNC != 0:
		d.add("clock", warned, "run chrony or systemd-timesyncd", "the kernel says that nothing synchronizes it")
	default:
		d.add("clock", stateOK, "", "synchronized, within %d ms", state.Maxerror/1000)
	}
	proc, err := procfs.NewDefaultFS()
	if err != nil {
		d.add("processes", skipped, "", "%v", err)
		return
	}
	owners := map[uint64]string{} // process of a listening socket, by inode
	all, _ := proc.AllProcs()     // without processes, owners are shown as unknown
	for _, p := range all {
		comm, err := p.Comm()
		if err != nil {
			continue // the process has ended
		}
		process := fmt.Sprintf("%s (process %d)", comm, p.PID)
		if slices.Contains(daemons, comm) {
			if l, err := p.Limits(); err == nil {
				d.files("open files of "+process, l.OpenFiles)
			}
		}
		targets, _ := p.FileDescriptorTargets() // unknown for processes of other users
		for _, t := range targets {
			if inode, isSocket := strings.CutPrefix(t, "socket:["); isSocket {
				if n, err := strconv.ParseUint(strings.TrimSuffix(inode, "]"), 10, 64); err == nil {
					owners[n] = process
				}
			}
		}
	}
	d.ports(owners)
}

func (d *doctor) files(check string, limit uint64) {
	state := stateOK
	if limit < minFiles {
		state = warned
	}
	d.add(check, state, "LimitNOFILE=1048576 in its unit, or ulimit -n: three quarters of it are for clients", "%d", limit)
}

// bpf checks which arrival stamps nsqd can use.
func (d *doctor) bpf() {
	const check = "arrival stamps"
	text, err := os.ReadFile("/proc/self/status")
	_, after, found := strings.Cut(string(text), "\nCapEff:\t")
	hex, _, _ := strings.Cut(after, "\n")
	caps, bad := strconv.ParseUint(hex, 16, 64)
	if err != nil || !found || bad != nil {
		d.add(check, skipped, "", "/proc/self/status says nothing of privileges")
		return
	}
	if _, err := os.Stat("/sys/kernel/btf/vmlinux"); err != nil {
		d.add(check, warned, "a kernel with CONFIG_DEBUG_INFO_BTF; nsqd takes socket timestamps without", "the kernel has no BTF: %v", err)
		return
	}
	if caps&capAdmin != 0 || caps&(capBPF|capPerfmon) == capBPF|capPerfmon {
		d.add(check, stateOK, "", "this user may use BPF (CAP_BPF, CAP_PERFMON)")
		return
	}
	d.add(check, warned, "AmbientCapabilities=CAP_BPF CAP_PERFMON in nsqd's unit, as the package has it, or nsqd --pin-arrival-stamps once as root", "this user may not use BPF; nsqd takes socket timestamps then")
}

// ports shows which process listens on each default port.
func (d *doctor) ports(owners map[uint64]string) {
	listening := map[int]string{}
	for _, file := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		text, _ := os.ReadFile(file) // a kernel without IPv6 has only the first
		for line := range strings.Lines(string(text)) {
			// sl, address:port (hex), remote, state (0A: listens), 5 more, inode
			f := strings.Fields(line)
			if len(f) < 10 || f[3] != "0A" {
				continue
			}
			_, hex, _ := strings.Cut(f[1], ":")
			port, _ := strconv.ParseUint(hex, 16, 16)
			inode, _ := strconv.ParseUint(f[9], 10, 64)
			listening[int(port)] = cmp.Or(owners[inode], "a process of another user")
		}
	}
	for _, p := range ports {
		check := "port " + strconv.Itoa(p.port) + " (" + p.use + ")"
		process := listening[p.port]
		name, _, _ := strings.Cut(p.use, ",")
		switch {
		case process == "":
			d.add(check, stateOK, "", "free")
		case strings.HasPrefix(process, name+" ") || strings.HasPrefix(process, "a process") || strings.HasPrefix(process, "srtm "):
			d.add(check, stateOK, "", "%s", process)
		default:
			d.add(check, warned, "stop it, or give "+name+" another address", "%s", process)
		}
	}
}

// space checks the free space of a folder's disk.
func (d *doctor) space(folder string) {
	check := "space of " + folder
	var fs unix.Statfs_t
	if err := unix.Statfs(folder, &fs); err != nil {
		d.add(check, failed, "create the folder for the daemon's user", "%v", err)
		return
	}
	free, all := fs.Bavail*uint64(fs.Bsize), fs.Blocks*uint64(fs.Bsize)
	state := stateOK
	switch {
	case free == 0 || fs.Ffree == 0 && fs.Files > 0:
		state = failed
	case free < minSpace || float64(free) < minFree*float64(all):
		state = warned
	}
	d.add(check, state, "make room, or bound logs with --max-log-bytes: publishers are refused where the disk is full", "%.1f GiB of %.1f GiB free", gib(free), gib(all))
}

func gib(bytes uint64) float64 { return float64(bytes) / (1 << 30) }

// atLeast compares the first two numbers of a kernel's release.
func atLeast(release, want string) bool {
	var a, b, c, e int
	if n, _ := fmt.Sscanf(release, "%d.%d", &a, &b); n < 2 {
		return false
	}
	_, _ = fmt.Sscanf(want, "%d.%d", &c, &e) // want is a constant of ours
	return a > c || a == c && b >= e
}
