package metadata

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/srtm-io/srtm/internal/durable"
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
	if errors.Is(err, ErrVersion) {
		return State{}, fmt.Errorf("%s: %w; start the nsqd that wrote it, or a later one", path, err)
	}
	if err != nil {
		return State{}, fmt.Errorf("%s: %w; restore it from a backup, or move it away: topics and channels with messages then come back, without pauses and contracts", path, err)
	}
	return s, nil
}

// minReserve is how many bytes are reserved on the disk for the next Write, at least.
const minReserve = 16 << 10

// Reserve makes room on the disk for the next Write, as far as the disk has room: on a disk
// that is full by then, topics can still be deleted. Not beside a Write.
func Reserve(path string) error { return reserve(path, 0) }

// reserve is Reserve after a Write of size bytes.
func reserve(path string, size int) error {
	return durable.Reserve(path, int64(max(minReserve, 2*size)))
}

// Write replaces the file, or leaves it as it was. When it returns nil the new
// one is on stable storage. One caller at a time.
func Write(path string, s State) error {
	b, err := Encode(s)
	if err != nil {
		return err
	}
	err = durable.Replace(path, b)
	_ = reserve(path, len(b)) // without room the next Write says so
	if err != nil {
		return fmt.Errorf("write metadata: %w", err)
	}
	return nil
}
