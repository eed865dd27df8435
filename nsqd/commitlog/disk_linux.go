package commitlog

import (
	"errors"
	"os"
	"syscall"
)

func (f osFile) Allocate(size int64) error {
	for {
		err := syscall.Fallocate(int(f.Fd()), 0, 0, size)
		switch {
		case errors.Is(err, syscall.EINTR):
		case errors.Is(err, errors.ErrUnsupported):
			return fill(f, size)
		default:
			return os.NewSyscallError("fallocate", err)
		}
	}
}

// syncData leaves out what fsync would write besides: the time of last
// change, which costs a commit of the journal each time.
func syncData(f *os.File) error {
	for {
		if err := syscall.Fdatasync(int(f.Fd())); !errors.Is(err, syscall.EINTR) {
			return os.NewSyscallError("fdatasync", err)
		}
	}
}
