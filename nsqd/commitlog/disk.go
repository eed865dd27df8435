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

// Disk holds the file operations of a Dir and its logs. Each is a function, so a test can replace
// it to fill the disk or to fail an fsync. All are safe for concurrent use.
type Disk struct {
	// Create creates a file that must not exist (fs.ErrExist). Open opens an existing file
	// (fs.ErrNotExist). Both open for reading and writing.
	Create, Open func(path string) (File, error)
	// Rename replaces any file at the new path.
	Rename func(from, to string) error
	// Remove deletes a file or an empty folder.
	Remove func(path string) error
	// Mkdir creates a folder in an existing folder.
	Mkdir func(path string) error
	// List returns the names in a folder.
	List func(path string) ([]string, error)
	// SyncDir makes the folder's list of files durable.
	SyncDir func(path string) error
	// Lock locks a folder for this process, or fails with ErrInUse.
	Lock func(path string) (unlock func() error, err error)
}

// File is an open file.
type File interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
	Truncate(size int64) error
	// Allocate reserves disk blocks for the first size bytes of the file. New bytes are zeros.
	Allocate(size int64) error
	Size() (int64, error)
	// Sync returns once everything written to the file is readable from stable storage.
	Sync() error
}

// ErrInUse means that a folder or one of its logs is already open, here or in another process.
var ErrInUse = errors.New("in use")

// lockName is not a log's folder: those have the suffix logSuffix.
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

type osFile struct{ file *os.File }

func openFile(path string, flag int) (File, error) {
	f, err := os.OpenFile(path, flag, 0o600)
	if err != nil {
		return nil, err
	}
	return osFile{f}, nil
}

func (f osFile) ReadAt(p []byte, at int64) (int, error)  { return f.file.ReadAt(p, at) }
func (f osFile) WriteAt(p []byte, at int64) (int, error) { return f.file.WriteAt(p, at) }
func (f osFile) Truncate(size int64) error               { return f.file.Truncate(size) }
func (f osFile) Close() error                            { return f.file.Close() }

func (f osFile) Size() (int64, error) {
	info, err := f.file.Stat()
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

// fill extends a file with zeros to size bytes.
func fill(f File, size int64) error {
	end, err := f.Size()
	if err == nil && end < size {
		err = writeAll(f, make([]byte, size-end), end)
	}
	return err
}

func (f osFile) Sync() error { return syncData(f.file) }

// lockFolder locks a file in the folder. It does not lock the folder itself, because some network
// file systems cannot. The system releases the lock when the process ends for any reason. The
// file stays: deleting it would let two processes lock two files with the same name.
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
	// The owner's pid, for the message above; the lock does not depend on it.
	if err := f.Truncate(0); err == nil {
		_, _ = f.WriteAt(fmt.Appendln(nil, os.Getpid()), 0)
	}
	return f.Close, nil
}

// LockID identifies the lock on the folder of an open Dir: the locked file and the boot of the
// kernel. If the folders of two processes have the same LockID, the processes never held the lock
// at the same time, so the earlier process has ended. A copy of the folder has another LockID.
// Empty: the kernel does not identify its boots.
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
