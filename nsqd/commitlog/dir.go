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
	removedSuffix = ".removed" // of a log's folder that is being deleted

	probeName = "probe" // not a log

	maxName = 200 // bytes; file systems allow 255 with the suffix
)

// ErrName means that a log's name is invalid: valid names are 1 to 200 of the characters a-z A-Z
// 0-9 . _ - and #.
var ErrName = errors.New("invalid name of a log")

// Dir is a folder of logs, locked by this process.
type Dir struct {
	// Set once.
	path    string
	disk    Disk
	unlock  func() error
	salt    func() uint64
	buffers sync.Pool // of *[]byte, for records on their way to a file
	most    int64     // approximate maximum of open files of all logs; 0: no bound

	files atomic.Int64 // open files. A log updates it on open and close; a stale read only delays the bound.

	mu struct {
		sync.Mutex
		closed bool
		opened []*Files            // logs with listed set, in order of opening: they may have open files
		open   map[string]struct{} // names of logs
		closes chan struct{}       // closed and replaced when a log is closed
	}
}

// OpenDir locks the folder for this process, creates it if necessary, and completes interrupted
// removals of logs. Outside of tests, disk is OS(). Error: ErrInUse if the folder is locked.
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

// Bound limits the open files of all logs to about files, besides files in use. At the bound, a
// log that opens a file makes the oldest listed logs close their files, after an fsync if
// necessary. Requires: no log was opened yet.
func (d *Dir) Bound(files int) { d.most = int64(files) }

// opened records that a log has opened a file.
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

// spare makes room for a file by closing files of logs that are not in use. Requires: no lock
// held, because spare waits for fsyncs.
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
	there := err != nil // perhaps created by a process that ended before the sync
	err = disk.SyncDir(filepath.Dir(path))
	if there && errors.Is(err, fs.ErrPermission) {
		return nil // this process cannot make the folder durable
	}
	return err
}

// Logs returns the names of the logs that have files in the folder, open or not, sorted.
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

// Probe writes and deletes a file of the given size, and reports an error of the disk. One caller
// at a time.
func (d *Dir) Probe(bytes int) error {
	path := filepath.Join(d.path, probeName)
	file, err := create(d.disk, path) // replaces a file left by an earlier process
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

// Close unlocks the folder. Requires: all logs are closed. Error: ErrInUse otherwise.
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

// Closes returns a channel that is closed when the next log is closed or removed. A caller that
// got ErrInUse may then retry.
func (d *Dir) Closes() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.mu.closes
}

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

func (d *Dir) Path(name string) string { return d.folder(name) }

func (d *Dir) folder(name string) string { return filepath.Join(d.path, name+logSuffix) }

// remove deletes a log's folder. It renames the folder first, so an interrupted removal leaves
// the whole log or is completed later.
func (d *Dir) remove(name string) error {
	doomed := filepath.Join(d.path, name+removedSuffix)
	if err := d.delete(doomed); err != nil { // of an earlier log of the same name
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
		if !synced { // make the renames durable before deleting files
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

// delete deletes a folder and its files, if the folder exists.
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

// validName keeps a log's files in its Dir: a name cannot contain a separator, and with its
// suffix cannot be . or ..
func validName(name string) bool {
	const allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-#"
	return len(name) > 0 && len(name) <= maxName &&
		!strings.ContainsFunc(name, func(r rune) bool { return !strings.ContainsRune(allowed, r) })
}
