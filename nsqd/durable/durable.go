// Package durable writes small files that survive a loss of power.
package durable

import (
	"errors"
	"os"
	"path/filepath"
)

// Temporary is the suffix of an unfinished Replace. A killed process may leave such a
// file.
const Temporary = ".new"

// Replace creates or replaces a file with the given bytes. After an error the old file is
// unchanged or fully replaced. Replace needs no disk space beyond the space that Reserve
// has reserved. Only one caller at a time may use a name.
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

// Write creates or overwrites a file with the given bytes.
func Write(path string, b []byte) error {
	return errors.Join(write(path, b), SyncDir(filepath.Dir(path)))
}

// Reserve reserves disk space for the next Replace with up to size bytes, in case the
// disk is full by then. Do not call it concurrently with a Replace of the same name.
func Reserve(path string, size int64) error {
	f, err := os.OpenFile(path+Temporary, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	if err = Allocate(f, size); err != nil { // release a reserve that is too small
		err = errors.Join(err, os.Remove(path+Temporary))
	}
	return errors.Join(err, f.Close())
}

// Allocate allocates disk blocks for the first size bytes of a file. New bytes are zeros.
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

// write keeps a file's blocks until all bytes are written.
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

// SyncDir makes the entries of a folder durable.
func SyncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
