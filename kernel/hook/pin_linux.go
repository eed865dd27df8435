package hook

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/kernel/stamp"
)

// Names in a pin directory. Exactly one of the two programs is there; its name
// says which it is.
const (
	pinProgram = "program"
	pinPlain   = "program-plain"
	pinConns   = "conns"
	pinEarly   = "early"
	pinCounts  = "counters"
	pinRings   = "rings"
)

// Pin loads the program and leaves it and its maps in dir, for a process with
// the same user and no privileges, which opens them with Config.PinDir. All
// rings are made now (MaxConns of RingRecords), since the other process may
// not make any. What an earlier Pin left in dir is replaced; a process that
// uses it is not disturbed. dir is made if need be, in a mounted bpffs; it and
// its files become the user's own, and no one else's.
//
// It needs CAP_BPF and CAP_PERFMON to load, and CAP_CHOWN to give away.
func Pin(dir string, uid, gid int, cfg Config) (err error) {
	if err := cfg.Validate(); err != nil {
		return err
	}
	cfg = cfg.withDefaults()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("pin: %w", err)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return fmt.Errorf("pin: statfs %s: %w", dir, err)
	}
	if uint32(fs.Type) != unix.BPF_FS_MAGIC {
		return fmt.Errorf("pin: %s is not in a bpffs (mount -t bpf bpf /sys/fs/bpf)", dir)
	}
	perChunk := uint32(1) // the program finds a slot in its chunk by the low bits
	for perChunk < uint32(cfg.MaxConns) {
		perChunk <<= 1
	}
	f, err := load(cfg, perChunk, false)
	if err != nil {
		var plainErr error
		if f, plainErr = load(cfg, perChunk, true); plainErr != nil {
			return fmt.Errorf("pin: %w", err)
		}
	}
	defer func() { err = errors.Join(err, f.close()) }()
	if err := f.tryOut(); err != nil {
		return fmt.Errorf("pin: self-test: %w", err)
	}

	program, other := pinProgram, pinPlain
	if f.plain {
		program, other = other, program
	}
	if err := os.Remove(filepath.Join(dir, other)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("pin: %w", err)
	}
	for _, p := range []struct {
		name string
		pin  func(string) error
	}{
		{program, f.prog.Pin}, {pinConns, f.conns.Pin}, {pinEarly, f.early.Pin},
		{pinCounts, f.counts.Pin}, {pinRings, f.slots.mu.chunks[0].Pin},
	} {
		path := filepath.Join(dir, p.name)
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("pin: %w", err)
		}
		if err := p.pin(path); err != nil {
			return fmt.Errorf("pin: %w", err)
		}
		if err := errors.Join(os.Chmod(path, 0o600), os.Chown(path, uid, gid)); err != nil {
			return fmt.Errorf("pin: %w", err)
		}
	}
	if err := errors.Join(os.Chmod(dir, 0o700), os.Chown(dir, uid, gid)); err != nil {
		return fmt.Errorf("pin: %w", err)
	}
	return nil
}

// openPinned opens what Pin left in dir. Only one process may: it hands out
// the slots.
func openPinned(dir string) (_ *filter, err error) {
	f := &filter{}
	if f.lock, err = lockDir(dir); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("pinned program: %w", err), f.close())
		}
	}()
	f.prog, err = ebpf.LoadPinnedProgram(filepath.Join(dir, pinProgram), nil)
	if errors.Is(err, os.ErrNotExist) {
		f.plain = true
		f.prog, err = ebpf.LoadPinnedProgram(filepath.Join(dir, pinPlain), nil)
	}
	if err != nil {
		return nil, err
	}
	var rings *ebpf.Map
	for _, p := range []struct {
		name string
		m    **ebpf.Map
	}{{pinConns, &f.conns}, {pinEarly, &f.early}, {pinCounts, &f.counts}, {pinRings, &rings}} {
		if *p.m, err = ebpf.LoadPinnedMap(filepath.Join(dir, p.name), nil); err != nil {
			return nil, fmt.Errorf("%s: %w", p.name, err)
		}
	}
	f.slots.add(rings)
	f.slots.records = (int(rings.ValueSize()) - stamp.HeaderSize) / stamp.RecordSize
	f.slots.limit = f.conns.MaxEntries()
	f.slots.window = windowSlots()
	f.slots.chunk = rings.MaxEntries()
	if r := f.slots.records; r < stamp.MinRing || r > stamp.MaxRing || r&(r-1) != 0 || f.slots.limit > f.slots.chunk {
		return nil, fmt.Errorf("%w: %d rings of %d records for %d connections", ErrUnsupported, f.slots.chunk, r, f.slots.limit)
	}
	// A process that died left its connections behind.
	var cookie uint64
	var dead []uint64
	for all := f.conns.Iterate(); ; {
		var slot uint32
		if !all.Next(&cookie, &slot) {
			if err = all.Err(); err != nil {
				return nil, fmt.Errorf("%s: %w", pinConns, err)
			}
			break
		}
		dead = append(dead, cookie)
	}
	for _, cookie := range dead {
		if err = f.conns.Delete(cookie); err != nil {
			return nil, fmt.Errorf("%s: %w", pinConns, err)
		}
	}
	f.baseline = f.sums()
	return f, nil
}

// lockDir keeps a second process from a pin directory, until the file is closed.
func lockDir(dir string) (*os.File, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("pin directory: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("pin directory %s is in use by another process: %w", dir, err), f.Close())
	}
	return f, nil
}
