package metadata

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// Read reads the file; one that does not exist is the zero State.
// Errors: ErrDamaged, ErrVersion, or that of reading.
func Read(path string) (State, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return State{}, nil
	}
	if err != nil {
		return State{}, fmt.Errorf("read metadata: %w", err)
	}
	s, err := Parse(b)
	if err != nil {
		return State{}, fmt.Errorf("%s: %w", path, err)
	}
	return s, nil
}

// Write replaces the file, or leaves it as it was. When it returns nil the new
// one is on stable storage. One caller at a time.
func Write(path string, s State) error {
	b, err := Encode(s)
	if err != nil {
		return err
	}
	if err := replace(path, b); err != nil {
		return fmt.Errorf("write metadata: %w", err)
	}
	return nil
}

func replace(path string, b []byte) error {
	temp := path + ".new"
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	if _, err = f.Write(b); err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(temp)) // its place may be what is missing
	}
	folder, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(folder.Sync(), folder.Close())
}
