// Package durable writes small files that are there after a loss of power. It knows nothing
// of what is in them.
package durable

import (
	"errors"
	"os"
	"path/filepath"
)

// Temporary ends the name of a file that Replace has not put in its place. One may be left
// by a process that was killed.
const Temporary = ".new"

// Replace makes these bytes a file, in place of one of that name. Unless it returns nil,
// that is as it was, or replaced. It needs no room on the disk as far as Reserve has made
// that. One caller at a time for a name.
func Replace(path string, b []byte) error {
	temp := path + Temporary
	err := write(temp, b)
	if err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		if left := os.Remove(temp); !errors.Is(left, os.ErrNotExist) {
			err = errors.Join(err, left)
		}
		return err
	}
	return SyncDir(filepath.Dir(path))
}

// Write makes these bytes a file, or what one of that name has.
func Write(path string, b []byte) error {
	return errors.Join(write(path, b), SyncDir(filepath.Dir(path)))
}

// Reserve makes room on the disk for the next Replace of a file with up to size bytes: a
// disk that is full by then has it. Not beside a Replace of that name.
func Reserve(path string, size int64) error {
	f, err := os.OpenFile(path+Temporary, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	if err = Allocate(f, size); err != nil { // the parts of a reserve that is too small are better given back
		err = errors.Join(err, os.Remove(path+Temporary))
	}
	return errors.Join(err, f.Close())
}

// Allocate gives a file blocks of the disk for its first size bytes: they are zeros where
// there was nothing.
func Allocate(f *os.File, size int64) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if err = allocate(f, size); errors.Is(err, errors.ErrUnsupported) {
		_, err = f.WriteAt(make([]byte, max(0, size-info.Size())), info.Size())
	}
	return err
}

// write leaves to a file the blocks that it has until all is written.
func write(path string, b []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	if _, err = f.Write(b); err == nil {
		err = f.Truncate(int64(len(b)))
	}
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// SyncDir makes it durable which files are in a folder.
func SyncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
