package commitlog

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Disk is the operations on files that a Dir and its logs use, each a
// function so that a test can replace one, to fill the disk or to fail an
// fsync. All of them may be called at the same time.
type Disk struct {
	// Create makes a file that must not exist (fs.ErrExist), Open opens one
	// that does (fs.ErrNotExist); both for reading and writing.
	Create, Open func(path string) (File, error)
	// Rename replaces what is at the new path.
	Rename func(from, to string) error
	// Remove deletes a file, or a folder that is empty.
	Remove func(path string) error
	// Mkdir makes a folder in one that exists.
	Mkdir func(path string) error
	// List returns the names in a folder.
	List func(path string) ([]string, error)
	// SyncDir makes it durable which files are in a folder.
	SyncDir func(path string) error
	// Lock takes a folder for this process, or fails with ErrInUse.
	Lock func(path string) (unlock func() error, err error)
}

// File is an open file.
type File interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
	Truncate(size int64) error
	// Allocate gives the file blocks of the disk for its first size bytes, which are zeros
	// where there was nothing.
	Allocate(size int64) error
	Size() (int64, error)
	// Sync returns when all that was written to the file is on stable storage,
	// with what is needed to read it back.
	Sync() error
}

// ErrInUse says that a folder, or a log of it, is already open, here or in
// another process.
var ErrInUse = errors.New("in use")

// lockName is no log's folder: those end in logSuffix.
const lockName = "lock"

// OS returns the operating system's operations.
func OS() Disk {
	return Disk{
		Create: func(path string) (File, error) {
			return openFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL)
		},
		Open:   func(path string) (File, error) { return openFile(path, os.O_RDWR) },
		Rename: os.Rename,
		Remove: os.Remove,
		Mkdir:  func(path string) error { return os.Mkdir(path, 0o700) },
		List: func(path string) ([]string, error) {
			d, err := os.Open(path)
			if err != nil {
				return nil, err
			}
			names, err := d.Readdirnames(-1)
			return names, errors.Join(err, d.Close())
		},
		SyncDir: func(path string) error {
			d, err := os.Open(path)
			if err != nil {
				return err
			}
			return errors.Join(d.Sync(), d.Close())
		},
		Lock: lockFolder,
	}
}

type osFile struct{ *os.File }

func openFile(path string, flag int) (File, error) {
	f, err := os.OpenFile(path, flag, 0o600)
	if err != nil {
		return nil, err
	}
	return osFile{f}, nil
}

func (f osFile) Size() (int64, error) {
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

// fill writes zeros from the end of a file to its first size bytes.
func fill(f File, size int64) error {
	end, err := f.Size()
	if err == nil && end < size {
		err = writeAll(f, make([]byte, size-end), end)
	}
	return err
}

func (f osFile) Sync() error { return syncData(f.File) }

// lockFolder locks a file in the folder: not the folder itself, which not all
// network file systems can lock. The system lets go of it when the process
// ends, however it ends. The file stays, since deleting it would let two
// processes hold locks on two files of the same name.
func lockFolder(path string) (func() error, error) {
	f, err := os.OpenFile(filepath.Join(path, lockName), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := lockFile(f); err != nil {
		if errors.Is(err, ErrInUse) {
			err = fmt.Errorf("%s: %w by %s", path, ErrInUse, owner(f))
		}
		return nil, errors.Join(err, f.Close())
	}
	// Who holds it, for the message above; the lock does not depend on it.
	if err := f.Truncate(0); err == nil {
		_, _ = f.WriteAt(fmt.Appendln(nil, os.Getpid()), 0)
	}
	return f.Close, nil
}

// LockID names the lock on the folder of an open Dir, on this boot of the kernel: the file
// that is locked, and the boot. Two processes whose folders have one LockID never held the
// lock at the same time, so the earlier one has ended. A copy of the folder has another
// LockID. Empty: the kernel does not tell its boots apart.
func LockID(path string) string {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	file, err := fileID(filepath.Join(path, lockName))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(boot)) + "/" + file
}

func owner(lock *os.File) string {
	var b [20]byte
	n, _ := lock.ReadAt(b[:], 0)
	if pid, err := strconv.Atoi(strings.TrimSpace(string(b[:n]))); err == nil {
		return fmt.Sprintf("process %d", pid)
	}
	return "another process"
}
