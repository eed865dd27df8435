package commitlog

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"time"

	"github.com/srtm-io/srtm/internal/obs"
)

const (
	cursorName = "cursors." // and the number of the file, 0 or 1
	keptSuffix = ".kept"    // in place of badSuffix: what can be read of it is not needed any more
)

// Trim is of Log. When nothing that there is is needed any more, and a snapshot of
// cursors that was saved since the last Append tells the next offset, all segments
// go.
func (l *Files) Trim(before Offset) error {
	l.mu.Lock()
	l.trimmed = max(l.trimmed, min(before, l.next))
	all := l.spentLocked()
	l.mu.Unlock()
	if all { // the active one, too
		l.appending.Lock()
		defer l.appending.Unlock()
	}
	l.keeping.Lock()
	defer l.keeping.Unlock()
	l.mu.Lock()
	closed := l.closed
	l.mu.Unlock()
	if closed {
		return ErrClosed
	}
	if err := l.free(all); err != nil {
		return fmt.Errorf("trim log %s: %w", l.name, err)
	}
	return nil
}

// spentLocked reports whether no segment is needed, not even to tell the next offset.
// Requires: mu held.
func (l *Files) spentLocked() bool {
	return len(l.segments) > 0 && l.trimmed >= l.next && l.savedNext >= l.next
}

// free deletes the segments that are trimmed and need not be retained; with all, the last one as well if it is not needed
// either. A file that cannot be deleted is found when the log is opened again, and
// deleted when it is trimmed again.
// Requires: keeping held; with all, appending, too.
func (l *Files) free(all bool) error {
	l.mu.Lock()
	all = all && l.spentLocked()
	end := len(l.segments)
	if !all {
		end-- // its name and what is in it tell the next offset
	}
	if end < 1 || l.segments[0].next > l.trimmed {
		l.mu.Unlock()
		return nil // most of the time
	}
	retain := l.retain
	l.mu.Unlock()
	now := l.cfg.Now()

	l.mu.Lock()
	n, left := 0, l.bytes
	var doomed []string
	var kept []*segment
	for ; n < end; n++ {
		s := l.segments[n]
		stays := (retain.Age > 0 || retain.Bytes > 0) &&
			(retain.Age == 0 || time.Duration(now-s.last) <= retain.Age) && (retain.Bytes == 0 || left-s.size() < retain.Bytes)
		if s.next > l.trimmed || stays {
			break
		}
		left -= s.size()
		if s.bad {
			kept = append(kept, s)
		} else {
			doomed = append(doomed, s.name())
		}
	}
	files := l.drop(n)
	l.stats.Trimmed += uint64(n)
	l.mu.Unlock()
	l.close(files...)
	for _, s := range kept {
		path := filepath.Join(l.folder, segmentName(s.base))
		if err := l.disk.Rename(path+badSuffix, path+keptSuffix); err != nil { // it comes again at the next start
			l.cfg.Log.Warn("damaged segment could not be renamed", keyLog, l.name, keyFile, s.name(), obs.KeyError, err)
		}
	}
	return l.delete(doomed)
}

// delete deletes files of the log.
func (l *Files) delete(names []string) error {
	if len(names) == 0 {
		return nil
	}
	var faults []error
	for _, name := range names {
		if err := l.disk.Remove(filepath.Join(l.folder, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			faults = append(faults, err)
		}
	}
	if err := l.disk.SyncDir(l.folder); err != nil {
		faults = append(faults, err)
	}
	if len(faults) > 0 {
		l.mu.Lock()
		l.stats.KeepErrors += uint64(len(faults))
		l.mu.Unlock()
	}
	return errors.Join(faults...)
}

// SaveCursors is of Log.
//
// It overwrites the older of two files. The design that lost writes a new file and
// renames it: four changes of the folder for each snapshot, which a journal of the
// file system has to commit, and no way to write when the disk is full.
func (l *Files) SaveCursors(b []byte) error {
	l.keeping.Lock()
	defer l.keeping.Unlock()
	l.mu.Lock()
	next, found, closed := l.next, l.found, l.closed
	l.mu.Unlock()
	if closed {
		return ErrClosed
	}
	if len(b) > maxRecordLimit {
		return fmt.Errorf("save cursors of log %s: %w: %d bytes, allowed are %d", l.name, ErrRecord, len(b), maxRecordLimit)
	}
	buf := appendSnapshot(make([]byte, 0, cursorExtra+len(b)), snapshot{number: l.saved + 1, next: next, data: b})
	err := l.ensureFolder(found)
	if err == nil {
		err = l.overwrite(l.slot, buf, found)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil { // the next one is written to the same file: the other is what there is
		l.stats.KeepErrors++
		return fmt.Errorf("save cursors of log %s: %w", l.name, noSpace(err))
	}
	l.stats.Saves++
	l.stats.SavedBytes += uint64(len(buf))
	l.saved++
	l.slot = 1 - l.slot
	l.firm = true
	l.savedNext = next
	return nil
}

// overwrite writes one of the files of the cursors. In a durable log, the first time
// it is a new file, which takes the other's name when it is durable: the snapshot of
// an earlier process in the file that stays may not be, if that ended while it wrote
// or its fsync failed.
// Requires: keeping held.
func (l *Files) overwrite(slot int, b []byte, found bool) error {
	path := l.cursorPath(slot)
	name := path
	file, err := File(nil), fs.ErrNotExist
	if l.cfg.Durable && !l.firm {
		name += newSuffix
	} else {
		file, err = l.disk.Open(path)
	}
	if errors.Is(err, fs.ErrNotExist) {
		file, err = l.create(name)
	}
	if err != nil {
		return err
	}
	err = writeAll(file, b, 0)
	if err == nil && l.cfg.Durable {
		err = file.Sync()
	}
	if err = errors.Join(err, file.Close()); err != nil || !l.cfg.Durable {
		return err
	}
	if name != path {
		err = l.disk.Rename(name, path)
	}
	if err == nil && !l.placed[slot] {
		err = l.place(found)
	}
	l.placed[slot] = err == nil
	return err
}

func (l *Files) cursorPath(slot int) string {
	return filepath.Join(l.folder, fmt.Sprint(cursorName, slot))
}

// LoadCursors is of Log.
func (l *Files) LoadCursors() ([]byte, error) {
	l.keeping.Lock()
	defer l.keeping.Unlock()
	l.mu.Lock()
	closed := l.closed
	l.mu.Unlock()
	if closed {
		return nil, ErrClosed
	}
	if l.saved == 0 {
		return nil, nil
	}
	s, err := l.loadSlot(1 - l.slot)
	if err != nil {
		return nil, fmt.Errorf("load cursors of log %s: %w", l.name, err)
	}
	return s.data, nil
}

// loadSlot reads one of the files of the cursors. The number is 0 if there is no
// intact snapshot in it; the data is empty if there is nothing in it at all.
func (l *Files) loadSlot(slot int) (snapshot, error) {
	file, err := l.disk.Open(l.cursorPath(slot))
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

// recoverCursors finds the last snapshot, and what it says of the log's next offset.
// Requires: no other goroutine knows l.
func (l *Files) recoverCursors() error {
	var both [2]snapshot
	for slot := range both {
		var err error
		if both[slot], err = l.loadSlot(slot); err != nil {
			return err
		}
	}
	last := 0
	if both[1].number > both[0].number {
		last = 1
	}
	l.saved, l.next, l.savedNext, l.slot = both[last].number, both[last].next, both[last].next, 1-last
	for slot, s := range both {
		if s.number > 0 || s.data == nil {
			continue
		}
		// The end of the process, or of the power, while it was written: the other one
		// holds. If there is none it was lost, or was the first there ever was.
		l.stats.Torn++
		l.stats.TornBytes += uint64(len(s.data))
		text, kept := "a snapshot of cursors was not written whole; the one before it holds", ""
		if l.saved == 0 {
			text, kept = "no snapshot of cursors is intact: channels begin with what there is in the log", fmt.Sprint(cursorName, slot, badSuffix)
			l.stats.KeepErrors++
			if err := l.disk.Rename(l.cursorPath(slot), filepath.Join(l.folder, kept)); err != nil {
				return err
			}
		}
		l.cfg.Log.Error(text, keyLog, l.name, keyFile, fmt.Sprint(cursorName, slot), "kept", kept)
	}
	return nil
}
