package metadata

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/srtm-io/srtm/nsqd/durable"
)

// Read reads the file and its changes. A missing file yields the zero State. Errors: ErrDamaged,
// ErrVersion, or a read error.
func Read(path string) (State, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return State{}, nil
	}
	if err != nil {
		return State{}, fmt.Errorf("read metadata: %w", err)
	}
	s, sum, err := parse(b)
	if err == nil {
		s, err = apply(path, sum, s)
	}
	if errors.Is(err, ErrVersion) {
		return State{}, fmt.Errorf("%s: %w; start the nsqd that wrote it, or a later one", path, err)
	}
	if err != nil {
		return State{}, fmt.Errorf("%s: %w; restore it from a backup, or move it away: topics and channels with messages then come back, without pauses and contracts", path, err)
	}
	return s, nil
}

// minReserve is the minimum disk space reserved for the next Write, in bytes.
const minReserve = 16 << 10

// Reserve reserves disk space for the next Write, if the disk has room. Topics can then still be
// deleted when the disk is full. Must not run concurrently with Write.
func Reserve(path string) error { return reserve(path, 0) }

// reserve is Reserve after a Write of size bytes.
func reserve(path string, size int) error {
	return durable.Reserve(path, int64(max(minReserve, 2*size)))
}

// Write replaces the file, or leaves the old file unchanged. After a nil error the new file is on
// stable storage. One caller at a time.
func Write(path string, s State) error {
	return NewFile(path).Write(s)
}

// replace replaces the file and ends its changes.
func replace(path string, b []byte) error {
	err := durable.Replace(path, b)
	if err == nil {
		err = removeChanges(path)
	}
	_ = reserve(path, len(b)) // without room the next Write fails
	if err != nil {
		return fmt.Errorf("write metadata: %w", err)
	}
	return nil
}
