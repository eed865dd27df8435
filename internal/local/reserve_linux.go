package local

import (
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// reservations opens the file whose byte n is locked by the process that uses port n. All processes
// of a user share the file, whatever their TMPDIR.
var reservations = sync.OnceValues(func() (*os.File, error) {
	return os.OpenFile(fmt.Sprintf("/tmp/srtm-ports-%d", os.Getuid()), os.O_RDWR|os.O_CREATE, 0o600)
})

// reserve takes a port for this process until it ends. Another process that runs this function
// finds the port taken, even while nothing listens at the port.
func reserve(port int) (taken bool, err error) {
	file, err := reservations()
	if err != nil {
		return false, fmt.Errorf("reserve a port: %w", err)
	}
	lock := unix.Flock_t{Type: unix.F_WRLCK, Start: int64(port), Len: 1}
	switch err := unix.FcntlFlock(file.Fd(), unix.F_OFD_SETLK, &lock); err {
	case nil:
		return true, nil
	case unix.EAGAIN, unix.EACCES:
		return false, nil
	default:
		return false, fmt.Errorf("reserve port %d in %s: %w", port, file.Name(), err)
	}
}
