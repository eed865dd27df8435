package commitlog

import (
	"errors"
	"os"
	"syscall"
)

// syncData leaves out what fsync would write besides: the time of last
// change, which costs a commit of the journal each time.
func syncData(f *os.File) error {
	for {
		if err := syscall.Fdatasync(int(f.Fd())); !errors.Is(err, syscall.EINTR) {
			return os.NewSyscallError("fdatasync", err)
		}
	}
}
