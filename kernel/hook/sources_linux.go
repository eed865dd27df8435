package hook

import "golang.org/x/sys/unix"

// sources lists the sources on Linux, best first.
var sources = []kind{{EBPF, openFilter}, {Timestamping, openTimestamping}}

func kernelRelease() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(u.Release[:])
}
