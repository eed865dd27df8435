package commitlog

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
)

const cursorName = "cursors." // followed by the number of the file, 0 or 1

// spareName is the name of a durable log's third file of cursors, which the first save of a process
// overwrites.
const spareName = "cursors" + newSuffix

// minCursors is the minimum size of each file of cursors, in bytes.
const minCursors = 4 << 10

// snapshots are the two files with a log's cursors; each save overwrites the older file. Both
// files, and the spare file of a durable log, reserve their disk blocks before messages can use
// them. So a snapshot can free a disk that is full of finished messages. The alternative, a new
// file and a rename, needs four changes of the folder for each snapshot, which the file system's
// journal must commit.
type snapshots struct {
	folder  folder // set once
	durable bool   // set once: Config.Durable

	saved  uint64 // number of the last snapshot
	slot   int    // the file to overwrite next
	firm   bool   // in a durable log: the snapshot in the other file is durable
	placed [2]bool
	size   int64 // of the largest snapshot that this process has saved
	blocks int64 // bytes reserved for each file; 0: unknown
}

// reserve gives each file blocks for snapshots of twice the largest size so far.
func (c *snapshots) reserve(found bool) error {
	want := max(minCursors, 2*c.size)
	if c.blocks >= want {
		return nil
	}
	if err := c.folder.make(found); err != nil {
		return err
	}
	paths := []string{c.path(0), c.path(1), c.folder.file(spareName)}
	if !c.durable {
		paths = paths[:2]
	}
	for _, path := range paths {
		file, err := c.open(path)
		if err == nil {
			err = errors.Join(file.Allocate(want), file.Close())
		}
		if err != nil {
			return err
		}
	}
	c.blocks = want
	return nil
}

// save replaces the last snapshot and returns its size. next is the log's next offset. After an
// error the next save uses the same file, because the other file has the last intact snapshot.
func (c *snapshots) save(data []byte, next Offset, found bool) (size int, err error) {
	b := appendSnapshot(make([]byte, 0, cursorExtra+len(data)), snapshot{number: c.saved + 1, next: next, data: data})
	spare := c.durable && !c.firm && c.saved > 0
	if err = c.folder.make(found); err == nil {
		err = c.overwrite(c.slot, b, spare, found)
	}
	if err != nil {
		return len(b), err
	}
	c.saved, c.slot, c.firm = c.saved+1, 1-c.slot, true
	c.size = max(c.size, int64(len(b)))
	if spare {
		c.blocks = 0 // the next process needs a spare file again
	}
	if spare || c.blocks > 0 {
		_ = c.reserve(found) // ahead of need; the next segment does not begin without it
	}
	return len(b), nil
}

// last returns the last saved snapshot, or nil.
func (c *snapshots) last() ([]byte, error) {
	if c.saved == 0 {
		return nil, nil
	}
	s, err := c.load(1 - c.slot)
	return s.data, err
}

// overwrite writes one of the files. The first save of a durable log's process writes the spare
// file and renames the file once it is durable. Until then the previous process's snapshot in the
// other file may not be durable, because that process may have ended during its write or its fsync
// may have failed. A log without a snapshot needs no spare file.
func (c *snapshots) overwrite(slot int, b []byte, spare, found bool) error {
	path := c.path(slot)
	name := path
	if spare {
		name = c.folder.file(spareName)
	}
	file, err := c.open(name)
	if err != nil {
		return err
	}
	err = writeAll(file, b, 0)
	if err == nil && c.durable {
		err = file.Sync()
	}
	if err = errors.Join(err, file.Close()); err != nil || !c.durable {
		return err
	}
	if name != path {
		err = c.folder.disk.Rename(name, path)
	}
	if err == nil && !c.placed[slot] {
		err = c.folder.place(found)
	}
	c.placed[slot] = err == nil
	return err
}

// open opens a file, or creates a missing file.
func (c *snapshots) open(path string) (File, error) {
	file, err := c.folder.disk.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return create(c.folder.disk, path)
	}
	return file, err
}

func (c *snapshots) path(slot int) string {
	return c.folder.file(fmt.Sprint(cursorName, slot))
}

// load reads one of the files. The number is 0 without an intact snapshot; then data holds the
// damaged bytes, or nil if the file is empty.
func (c *snapshots) load(slot int) (snapshot, error) {
	file, err := c.folder.disk.Open(c.path(slot))
	if errors.Is(err, fs.ErrNotExist) {
		return snapshot{}, nil
	}
	if err != nil {
		return snapshot{}, err
	}
	size, err := file.Size()
	b := make([]byte, min(size, cursorExtra+maxRecordLimit))
	if err == nil {
		var n int
		n, err = readFull(file, b, 0)
		b = b[:n]
	}
	if err = errors.Join(err, file.Close()); err != nil {
		return snapshot{}, err
	}
	s, ok, err := parseSnapshot(b)
	switch {
	case err != nil:
		return snapshot{}, fmt.Errorf("%s%d: %w", cursorName, slot, err)
	case ok && s.number > 0:
		return s, nil
	case len(bytes.Trim(b, "\x00")) == 0:
		return snapshot{}, nil
	}
	return snapshot{data: b}, nil
}

// recover finds the last snapshot, and the content of both files.
func (c *snapshots) recover() (last snapshot, both [2]snapshot, err error) {
	for slot := range both {
		if both[slot], err = c.load(slot); err != nil {
			return last, both, err
		}
	}
	at := 0
	if both[1].number > both[0].number {
		at = 1
	}
	c.saved, c.slot = both[at].number, 1-at
	return both[at], both, nil
}
