package commitlog

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
)

const (
	logSuffix     = ".log"     // of a log's folder
	removedSuffix = ".removed" // of one that is being deleted

	probeName = "probe" // is no log's

	maxName = 200 // bytes; file systems allow 255 with the suffix
)

// ErrName says that a log cannot have that name: 1 to 200 of the characters
// a-z A-Z 0-9 . _ - and #.
var ErrName = errors.New("invalid name of a log")

// Dir is a folder of logs, held by this process alone.
type Dir struct {
	// Set once.
	path    string
	disk    Disk
	unlock  func() error
	salt    func() uint64
	buffers sync.Pool // of *[]byte, for records on their way to a file
	most    int64     // files of logs that are open, about; 0: they are not bounded

	files atomic.Int64 // that are open; who opens and closes them writes it. A stale read bounds a bit later

	mu struct {
		sync.Mutex
		closed bool
		opened []*Files            // those with listed set, the first opened first: they may have open files
		open   map[string]struct{} // names of logs
		closes chan struct{}       // closed and replaced when one is closed
	}
}

// OpenDir takes the folder, which is created if it does not exist, for this
// process, and finishes the removal of logs if one was interrupted. The
// error is ErrInUse when the folder is taken. disk is where files are, OS()
// outside of tests.
func OpenDir(path string, disk Disk) (*Dir, error) {
	if err := makeFolder(disk, path); err != nil {
		return nil, fmt.Errorf("open folder of logs: %w", err)
	}
	unlock, err := disk.Lock(path)
	if err != nil {
		return nil, fmt.Errorf("open folder of logs: %w", err)
	}
	d := &Dir{path: path, disk: disk, unlock: unlock, salt: rand.Uint64}
	d.buffers.New = func() any { return new([]byte) }
	d.mu.open = make(map[string]struct{})
	d.mu.closes = make(chan struct{})
	if err := d.finishRemovals(); err != nil {
		return nil, errors.Join(fmt.Errorf("finish removal of a log: %w", err), unlock())
	}
	return d, nil
}

// Bound has about so many files of all logs open at most, beside those in use: one more
// has a log of those that opened theirs first close all it has, after an fsync if need be.
// Requires: no log was opened yet.
func (d *Dir) Bound(files int) { d.most = int64(files) }

// opened notes that a log has opened a file.
func (d *Dir) opened(l *Files) {
	d.files.Add(1)
	if d.most == 0 {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if !l.listed {
		l.listed = true
		d.mu.opened = append(d.mu.opened, l)
	}
}

// spare makes room for a file, as far as logs are not in use just then.
// Requires: no lock held, since it waits for fsyncs.
func (d *Dir) spare() {
	if d.most == 0 || d.files.Load() < d.most {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for n := len(d.mu.opened); n > 0 && len(d.mu.opened) > 0 && d.files.Load() >= d.most; n-- {
		l := d.mu.opened[0]
		d.mu.opened = d.mu.opened[1:]
		l.listed = false
		d.mu.Unlock()
		rests := l.tryRest()
		d.mu.Lock()
		if !rests && !l.listed {
			l.listed = true
			d.mu.opened = append(d.mu.opened, l)
		}
	}
}

// makeFolder makes the folder, and those above it that do not exist.
func makeFolder(disk Disk, path string) error {
	err := disk.Mkdir(path)
	if parent := filepath.Dir(path); errors.Is(err, fs.ErrNotExist) && parent != path {
		if err := makeFolder(disk, parent); err != nil {
			return err
		}
		err = disk.Mkdir(path)
	}
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	there := err != nil // perhaps since a process that ended just then
	err = disk.SyncDir(filepath.Dir(path))
	if there && errors.Is(err, fs.ErrPermission) {
		return nil // not ours to make durable
	}
	return err
}

// Logs returns the names of the logs that have files in the folder, sorted,
// opened or not.
func (d *Dir) Logs() ([]string, error) {
	files, err := d.disk.List(d.path)
	if err != nil {
		return nil, fmt.Errorf("list logs: %w", err)
	}
	var names []string
	for _, file := range files {
		if name, ok := strings.CutSuffix(file, logSuffix); ok && validName(name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, nil
}

// Probe reports whether the disk takes so many bytes now: it writes a file and
// deletes it. One caller at a time.
func (d *Dir) Probe(bytes int) error {
	path := filepath.Join(d.path, probeName)
	file, err := create(d.disk, path) // a process may have ended just then
	if err != nil {
		return fmt.Errorf("probe the disk: %w", err)
	}
	if err = writeAll(file, make([]byte, bytes), 0); err == nil {
		err = file.Sync()
	}
	if err = errors.Join(err, file.Close(), d.disk.Remove(path)); err != nil {
		return fmt.Errorf("probe the disk: %w", noSpace(err))
	}
	return nil
}

// Close gives the folder up.
// Requires: its logs are closed; the error is ErrInUse otherwise.
func (d *Dir) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if n := len(d.mu.open); n > 0 {
		return fmt.Errorf("close folder of logs: %d logs are %w", n, ErrInUse)
	}
	if d.mu.closed {
		return ErrClosed
	}
	d.mu.closed = true
	return d.unlock()
}

// Closes returns a channel that is closed when the next log is closed or removed:
// then it may be time to try again what was ErrInUse.
func (d *Dir) Closes() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.mu.closes
}

// claim reserves a log's name for one Files.
func (d *Dir) claim(name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.closed {
		return ErrClosed
	}
	if _, ok := d.mu.open[name]; ok {
		return ErrInUse
	}
	d.mu.open[name] = struct{}{}
	return nil
}

func (d *Dir) unclaim(l *Files) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if l.listed {
		d.mu.opened = slices.DeleteFunc(d.mu.opened, func(o *Files) bool { return o == l })
	}
	delete(d.mu.open, l.cfg.Name)
	close(d.mu.closes)
	d.mu.closes = make(chan struct{})
}

// Path returns the folder of a log.
func (d *Dir) Path(name string) string { return d.folder(name) }

func (d *Dir) folder(name string) string { return filepath.Join(d.path, name+logSuffix) }

// remove deletes a log's folder. It is renamed first, so that a removal that
// is interrupted leaves the log as it was or is finished later: never a part
// of it.
func (d *Dir) remove(name string) error {
	doomed := filepath.Join(d.path, name+removedSuffix)
	if err := d.delete(doomed); err != nil { // of an earlier log of that name
		return err
	}
	err := d.disk.Rename(d.folder(name), doomed)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // nothing was ever written
	}
	if err != nil {
		return err
	}
	if err := d.disk.SyncDir(d.path); err != nil {
		return err
	}
	return d.delete(doomed)
}

func (d *Dir) finishRemovals() error {
	files, err := d.disk.List(d.path)
	if err != nil {
		return err
	}
	synced := false
	for _, file := range files {
		if name, ok := strings.CutSuffix(file, removedSuffix); !ok || !validName(name) {
			continue
		}
		if !synced { // the renaming, before its consequences
			if err := d.disk.SyncDir(d.path); err != nil {
				return err
			}
			synced = true
		}
		if err := d.delete(filepath.Join(d.path, file)); err != nil {
			return err
		}
	}
	return nil
}

// delete deletes a folder and the files in it, if it exists.
func (d *Dir) delete(folder string) error {
	files, err := d.disk.List(folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, file := range files {
		if err := d.disk.Remove(filepath.Join(folder, file)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return d.disk.Remove(folder)
}

// validName is what keeps a log's files in its Dir: no separator of folders
// is allowed, and with its suffix no name is . or ..
func validName(name string) bool {
	const allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-#"
	return len(name) > 0 && len(name) <= maxName &&
		!strings.ContainsFunc(name, func(r rune) bool { return !strings.ContainsRune(allowed, r) })
}
