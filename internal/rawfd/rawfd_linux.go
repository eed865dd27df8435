//go:build !race

package rawfd

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Read reads what is there. EAGAIN: nothing.
func Read(fd int, b []byte) (int, syscall.Errno) {
	for {
		n, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
		switch errno {
		case 0:
			return int(n), 0
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}

// Write writes what is taken. EAGAIN: nothing is.
func Write(fd int, b []byte) (int, syscall.Errno) {
	for {
		n, _, errno := unix.RawSyscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
		switch errno {
		case 0:
			return int(n), 0
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}
