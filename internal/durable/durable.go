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
// that is as it was, or replaced. One caller at a time for a name.
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

func write(path string, b []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	if _, err = f.Write(b); err == nil {
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
