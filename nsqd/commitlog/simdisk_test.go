package commitlog

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
)

// simDisk is a disk that can lose power. For each file simDisk keeps the fsynced content and the writes since. For each
// folder simDisk keeps the changes that were not fsynced. After a crash the fsynced state exists. The rest is any state
// that a file system might leave: nothing, a part in any order, zeros, garbage, or pieces of other files.
//
// After operation number dieAt, no operation works any more. The operation dieAt itself may be half done.
type simDisk struct {
	mu       sync.Mutex
	rng      *rand.Rand
	root     *simFolder
	locked   bool
	ops      int                         // operations that change something, or sync
	dieAt    int                         // 0: never
	dead     bool                        // the power is gone
	capacity int64                       // bytes of all files
	fault    func(op, name string) error // returns the fault of an operation on the named file; nil: no faults
	mindful  bool                        // data of a failed fsync always reads as written
	forgot   bool                        // an fsync has failed, and its data reads differently now
	readAt   int64                       // bytes read, by ReadAt
	open     int                         // files
}

var (
	errPower = errors.New("the power is gone")
	errIO    = syscall.EIO
)

// simNode is a *simFile or a *simFolder.
type simNode any

type simFile struct {
	data    []byte // as readers read the file
	durable []byte
	dirty   int // data from this index on is not fsynced; len(data) if all data is
}

type simFolder struct {
	now, durable map[string]simNode
	pending      []simChange // from durable to now
}

// simChange is one atomic change of a folder. The node gets the name to, unless to is empty, and loses the name from,
// unless from is empty.
type simChange struct {
	from, to string
	node     simNode
}

func (c simChange) apply(m map[string]simNode) {
	if c.from != "" && m[c.from] == c.node {
		delete(m, c.from)
	}
	if c.to != "" {
		m[c.to] = c.node
	}
}

func newSimFolder() *simFolder {
	return &simFolder{now: map[string]simNode{}, durable: map[string]simNode{}}
}

func newSimDisk(rng *rand.Rand) *simDisk {
	return &simDisk{rng: rng, root: newSimFolder(), capacity: 1 << 40}
}

// disk returns the operations of the simulated disk.
func (d *simDisk) disk() Disk {
	return Disk{
		Create: func(path string) (File, error) { return d.openFile("create", path) },
		Open:   func(path string) (File, error) { return d.openFile("open", path) },
		Rename: func(from, to string) error {
			return d.change("rename", from, func(dir *simFolder, name string) (simChange, error) {
				node, ok := dir.now[name]
				if !ok {
					return simChange{}, fs.ErrNotExist
				}
				return simChange{from: name, to: filepath.Base(to), node: node}, nil
			})
		},
		Remove: func(path string) error {
			return d.change("remove", path, func(dir *simFolder, name string) (simChange, error) {
				node, ok := dir.now[name]
				if !ok {
					return simChange{}, fs.ErrNotExist
				}
				if sub, ok := node.(*simFolder); ok && len(sub.now) > 0 {
					return simChange{}, syscall.ENOTEMPTY
				}
				return simChange{from: name, node: node}, nil
			})
		},
		Mkdir: func(path string) error {
			return d.change("mkdir", path, func(dir *simFolder, name string) (simChange, error) {
				if _, ok := dir.now[name]; ok {
					return simChange{}, fs.ErrExist
				}
				return simChange{to: name, node: newSimFolder()}, nil
			})
		},
		List: func(path string) ([]string, error) {
			d.mu.Lock()
			defer d.mu.Unlock()
			if d.dead {
				return nil, errPower
			}
			dir, err := d.folder(path)
			if err != nil {
				return nil, err
			}
			return slices.Sorted(maps.Keys(dir.now)), nil
		},
		SyncDir: func(path string) error {
			d.mu.Lock()
			defer d.mu.Unlock()
			if err := d.begin("syncdir", path); err != nil {
				return err
			}
			dir, err := d.folder(path)
			if err != nil {
				return err
			}
			if d.dead {
				return errPower
			}
			dir.durable, dir.pending = maps.Clone(dir.now), nil
			return nil
		},
		Lock: func(path string) (func() error, error) {
			d.mu.Lock()
			defer d.mu.Unlock()
			if d.locked {
				return nil, ErrInUse
			}
			d.locked = true
			return func() error {
				d.mu.Lock()
				defer d.mu.Unlock()
				d.locked = false
				return nil
			}, nil
		},
	}
}

// begin counts an operation. At the fatal operation begin sets dead and returns nil, so that the caller does a part of
// the operation.
func (d *simDisk) begin(op, path string) error {
	if d.dead {
		return errPower
	}
	if d.fault != nil {
		if err := d.fault(op, filepath.Base(path)); err != nil {
			return err
		}
	}
	d.ops++
	d.dead = d.ops == d.dieAt
	return nil
}

func (d *simDisk) folder(path string) (*simFolder, error) {
	dir := d.root
	for part := range strings.SplitSeq(strings.Trim(path, "/"), "/") {
		if part == "" {
			continue
		}
		sub, ok := dir.now[part].(*simFolder)
		if !ok {
			return nil, fmt.Errorf("%s: %w", path, fs.ErrNotExist)
		}
		dir = sub
	}
	return dir, nil
}

// change does one change of a folder. The fatal change happens or does not, at random.
func (d *simDisk) change(op, path string, f func(dir *simFolder, name string) (simChange, error)) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.begin(op, path); err != nil {
		return err
	}
	dir, err := d.folder(filepath.Dir(path))
	if err != nil {
		return err
	}
	c, err := f(dir, filepath.Base(path))
	if err != nil {
		return err
	}
	if !d.dead || d.rng.IntN(2) == 0 {
		c.apply(dir.now)
		dir.pending = append(dir.pending, c)
	}
	if d.dead {
		return errPower
	}
	return nil
}

func (d *simDisk) openFile(op, path string) (File, error) {
	if op == "create" {
		err := d.change(op, path, func(dir *simFolder, name string) (simChange, error) {
			if _, ok := dir.now[name]; ok {
				return simChange{}, fs.ErrExist
			}
			return simChange{to: name, node: new(simFile)}, nil
		})
		if err != nil {
			return nil, err
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.dead {
		return nil, errPower
	}
	if d.fault != nil && op == "open" {
		if err := d.fault(op, filepath.Base(path)); err != nil {
			return nil, err
		}
	}
	dir, err := d.folder(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	f, ok := dir.now[filepath.Base(path)].(*simFile)
	if !ok {
		return nil, fmt.Errorf("%s: %w", path, fs.ErrNotExist)
	}
	d.open++
	h := &simHandle{disk: d, simFile: f, name: filepath.Base(path)}
	return h, nil
}

type simHandle struct {
	disk *simDisk
	*simFile
	name   string
	closed bool
}

func (h *simHandle) usable() error {
	if h.closed {
		return fs.ErrClosed
	}
	if h.disk.dead {
		return errPower
	}
	return nil
}

func (h *simHandle) Close() error {
	h.disk.mu.Lock()
	defer h.disk.mu.Unlock()
	if h.closed {
		return fs.ErrClosed
	}
	h.closed = true
	h.disk.open--
	return nil
}

func (h *simHandle) Size() (int64, error) {
	h.disk.mu.Lock()
	defer h.disk.mu.Unlock()
	return int64(len(h.data)), h.usable()
}

func (h *simHandle) ReadAt(b []byte, off int64) (int, error) {
	h.disk.mu.Lock()
	defer h.disk.mu.Unlock()
	if err := h.usable(); err != nil {
		return 0, err
	}
	if h.disk.fault != nil {
		if err := h.disk.fault("read", h.name); err != nil {
			return 0, err
		}
	}
	if off >= int64(len(h.data)) {
		return 0, io.EOF
	}
	n := copy(b, h.data[off:])
	h.disk.readAt += int64(n)
	if n < len(b) {
		return n, io.EOF
	}
	return n, nil
}

// errShort makes a fault of "write" write half, without an error.
var errShort = errors.New("short write")

func (h *simHandle) WriteAt(b []byte, off int64) (int, error) {
	d := h.disk
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := h.usable(); err != nil {
		return 0, err
	}
	err := d.begin("write", h.name)
	switch {
	case errors.Is(err, errShort):
		b, err = b[:len(b)/2], nil
	case err != nil:
		b = b[:d.rng.IntN(len(b)+1)]
	case d.dead:
		b, err = b[:d.rng.IntN(len(b)+1)], errPower
	}
	if room := max(0, d.capacity-d.used()-max(0, off-int64(len(h.data)))); off+int64(len(b))-int64(len(h.data)) > room && err == nil {
		b, err = b[:max(0, int64(len(h.data))+room-off)], syscall.ENOSPC
	}
	if len(b) > 0 {
		end := int(off) + len(b)
		if end > len(h.data) {
			h.data = append(h.data, make([]byte, end-len(h.data))...)
		}
		copy(h.data[off:], b)
		h.dirty = min(h.dirty, int(off))
	}
	return len(b), err
}

func (h *simHandle) Allocate(size int64) error {
	end, err := h.Size()
	if err == nil && end < size {
		_, err = h.WriteAt(make([]byte, size-end), end)
	}
	return err
}

func (h *simHandle) Truncate(size int64) error {
	d := h.disk
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := h.usable(); err != nil {
		return err
	}
	if err := d.begin("truncate", h.name); err != nil {
		return err
	}
	if d.dead {
		return errPower
	}
	if size < int64(len(h.data)) {
		h.data = h.data[:size:size]
		h.dirty = min(h.dirty, int(size))
	}
	return nil
}

func (h *simHandle) Sync() error {
	d := h.disk
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := h.usable(); err != nil {
		return err
	}
	if err := d.begin("sync", h.name); err != nil {
		// Data whose write failed counts as written, and the disk may forget the data or not.
		mix := d.after(h.simFile, nil)
		if !d.mindful && d.rng.IntN(2) == 0 {
			h.data = slices.Concat(mix, make([]byte, len(h.data)))[:len(h.data)]
			d.forgot = true
		}
		h.durable, h.dirty = mix, len(h.data)
		return err
	}
	if d.dead {
		return errPower
	}
	written := slices.Concat(h.durable, make([]byte, len(h.data)))[:h.dirty]
	h.durable = append(written, h.data[h.dirty:]...)
	h.dirty = len(h.data)
	return nil
}

// used returns the size of all files.
func (d *simDisk) used() int64 {
	var walk func(dir *simFolder) int64
	walk = func(dir *simFolder) (sum int64) {
		for _, node := range dir.now {
			switch n := node.(type) {
			case *simFile:
				sum += int64(len(n.data))
			case *simFolder:
				sum += walk(n)
			}
		}
		return sum
	}
	return walk(d.root)
}

// after returns a content that a crash may leave in a file.
func (d *simDisk) after(f *simFile, others [][]byte) []byte {
	safe := min(f.dirty, len(f.durable))
	out := slices.Clone(f.durable[:safe])
	longest := max(len(f.data), len(f.durable))
	size := safe
	if longest > safe {
		size += d.rng.IntN(longest - safe + 1)
	}
	switch d.rng.IntN(4) {
	case 0: // as written, up to a random index
		return append(out, f.data[min(safe, len(f.data)):min(size, len(f.data))]...)
	case 1: // all data
		return append(out, f.data[min(safe, len(f.data)):]...)
	case 2:
		return append(out, f.durable[safe:]...)
	}
	for len(out) < size {
		n := min(1+d.rng.IntN(200), size-len(out))
		piece := make([]byte, n) // zeros
		source := f.data
		switch d.rng.IntN(6) {
		case 0:
		case 1:
			source = f.durable
			fallthrough
		case 2, 3:
			if len(source) > len(out) {
				copy(piece, source[len(out):])
			}
		case 4:
			for i := range piece {
				piece[i] = byte(d.rng.Uint32())
			}
		case 5:
			if len(others) > 0 {
				if o := others[d.rng.IntN(len(others))]; len(o) > len(out) {
					copy(piece, o[len(out):])
				}
			}
		}
		out = append(out, piece...)
	}
	return out
}

// crash returns the disk as it may be found after a loss of power now.
func (d *simDisk) crash() *simDisk {
	d.mu.Lock()
	defer d.mu.Unlock()
	next := newSimDisk(d.rng)
	next.capacity = d.capacity
	seen := make(map[*simFile]*simFile)
	next.root = d.crashFolder(d.root, seen)
	return next
}

func (d *simDisk) crashFolder(dir *simFolder, seen map[*simFile]*simFile) *simFolder {
	kept := maps.Clone(dir.durable)
	inOrder := d.rng.IntN(2) == 0 // as a journal applies the changes; otherwise any subset
	prefix := d.rng.IntN(len(dir.pending) + 1)
	for i, c := range dir.pending {
		if inOrder && i < prefix || !inOrder && d.rng.IntN(2) == 0 {
			c.apply(kept)
		}
	}
	// New blocks of a file may have any content that was on the disk.
	var others [][]byte
	for _, m := range []map[string]simNode{dir.durable, dir.now} {
		for _, name := range slices.Sorted(maps.Keys(m)) {
			if f, ok := m[name].(*simFile); ok {
				others = append(others, f.data)
			}
		}
	}
	out := newSimFolder()
	for _, name := range slices.Sorted(maps.Keys(kept)) {
		switch n := kept[name].(type) {
		case *simFile:
			f := seen[n]
			if f == nil {
				f = &simFile{durable: d.after(n, others)}
				f.data = slices.Clone(f.durable)
				f.dirty = len(f.data)
				seen[n] = f
			}
			out.now[name] = f
		case *simFolder:
			out.now[name] = d.crashFolder(n, seen)
		}
	}
	out.durable = maps.Clone(out.now)
	return out
}

// kill ends the process, not the machine: written data exists, though not durable.
func (d *simDisk) kill() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.locked = false
	d.open = 0
}

// edit changes the content of a file; processes that have the file open do not notice.
func (d *simDisk) edit(path string, f func(b []byte) []byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	dir, err := d.folder(filepath.Dir(path))
	if err != nil {
		panic(err)
	}
	file, ok := dir.now[filepath.Base(path)].(*simFile)
	if !ok {
		file = new(simFile)
		dir.now[filepath.Base(path)] = file
		dir.durable[filepath.Base(path)] = file
	}
	file.data = f(slices.Clone(file.data))
	file.durable = slices.Clone(file.data)
	file.dirty = len(file.data)
}

// content returns a file's bytes.
func (d *simDisk) content(path string) (b []byte) {
	d.edit(path, func(was []byte) []byte {
		b = slices.Clone(was)
		return was
	})
	return b
}
