package metadata

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/srtm-io/srtm/internal/durable"
)

// File is the metadata file of one process, with the file of changes beside it. One goroutine
// at a time uses it.
type File struct {
	path       string
	minWhole   int64  // the size from which changes are appended, in bytes
	generation uint64 // of the file; 0: there is none
	size       int64  // of the file, in bytes; 0: changes cannot be appended to it

	// changes is the file of changes of this generation that takes more; nil: none does.
	changes *os.File
	changed int64 // bytes in it
}

// Open reads the files; without any there is the zero State.
// Errors: ErrDamaged, ErrVersion, or that of reading.
func Open(path string) (*File, State, error) {
	f := &File{path: path, minWhole: minWhole}
	b, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, State{}, fmt.Errorf("read metadata: %w", err)
	}
	var s State
	if err == nil {
		s, f.generation, err = parse(b)
		switch {
		case errors.Is(err, ErrVersion):
			return nil, State{}, fmt.Errorf("%s: %w; start the nsqd that wrote it, or a later one", path, err)
		case err != nil:
			return nil, State{}, fmt.Errorf("%s: %w; restore it from a backup, or move it away: topics and channels with messages then come back, without pauses and contracts", path, err)
		}
	}
	text, err := os.ReadFile(path + changesSuffix)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return f, s, nil
	case err != nil:
		return nil, State{}, fmt.Errorf("read changes of metadata: %w", err)
	}
	if s, err = replay(s, f.generation, text); err != nil {
		return nil, State{}, fmt.Errorf("%s: %w; restore it and %s from a backup, or move it away: topics and channels are then as %[3]s has them", path+changesSuffix, err, filepath.Base(path))
	}
	return f, s, nil
}

// Read returns what the files say, for a process that writes none. Errors: as Open.
func Read(path string) (State, error) {
	_, s, err := Open(path)
	return s, err
}

// minReserve is how many bytes are reserved on the disk for the next Write, at least.
const minReserve = 16 << 10

// Reserve makes room on the disk for the next Write, as far as the disk has room: on a disk
// that is full by then, topics can still be deleted.
func (f *File) Reserve() error { return f.reserve(0) }

// reserve is Reserve after a Write of size bytes.
func (f *File) reserve(size int) error {
	return durable.Reserve(f.path, int64(max(minReserve, 2*size)))
}

// Write replaces the file, or leaves it as it was. When it returns nil the new
// one is on stable storage.
func (f *File) Write(s State) error {
	b, err := encode(s, f.generation+1)
	if err != nil {
		return err
	}
	err = durable.Replace(f.path, b)
	_ = f.reserve(len(b)) // without room the next Write says so
	f.endChanges()
	f.size = 0
	if err != nil { // the file of either generation may be there
		return fmt.Errorf("write metadata: %w", err)
	}
	f.generation++
	f.size = int64(len(b))
	_ = os.Remove(f.path + changesSuffix) // it is of an earlier generation, and means nothing
	return nil
}

// Close ends the use of the file.
func (f *File) Close() { f.endChanges() }

func (f *File) endChanges() {
	if f.changes != nil {
		_ = f.changes.Close() // all that counts is synced
		f.changes, f.changed = nil, 0
	}
}
