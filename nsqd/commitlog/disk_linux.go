package commitlog

import (
	"errors"
	"os"
	"syscall"
)

func (f osFile) Allocate(size int64) error {
	for {
		err := syscall.Fallocate(int(f.file.Fd()), 0, 0, size)
		switch {
		case errors.Is(err, syscall.EINTR):
		case errors.Is(err, errors.ErrUnsupported):
			return fill(f, size)
		default:
			return os.NewSyscallError("fallocate", err)
		}
	}
}

// syncData does not write the modification time, which fsync would write. That saves a commit of
// the journal.
func syncData(f *os.File) error {
	for {
		if err := syscall.Fdatasync(int(f.Fd())); !errors.Is(err, syscall.EINTR) {
			return os.NewSyscallError("fdatasync", err)
		}
	}
}
