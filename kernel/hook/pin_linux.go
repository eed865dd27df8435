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

// Names in a pin directory. Only one of the two programs exists there, under its own name.
const (
	pinProgram = "program"
	pinPlain   = "program-plain"
	pinConns   = "conns"
	pinEarly   = "early"
	pinCounts  = "counters"
	pinRings   = "rings"
)

// Pin loads the program and leaves the program and its maps in dir. A process of the given user can
// open them without privileges through Config.PinDir. Pin makes all rings (MaxConns rings of
// RingRecords), because the other process cannot make rings. Pin replaces the objects of an earlier
// Pin in dir; a process that uses the old objects is not disturbed. Pin creates dir if necessary,
// in a mounted bpffs. Only the user can access dir and its files.
//
// Pin requires CAP_BPF and CAP_PERFMON to load the program, and CAP_CHOWN to change the owner.
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
	perChunk := uint32(1) // a power of two: the program uses the low bits as the index in a chunk
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

	program, otherProgram := pinProgram, pinPlain
	if f.unbased {
		program, otherProgram = otherProgram, program
	}
	if err := os.Remove(filepath.Join(dir, otherProgram)); err != nil && !errors.Is(err, os.ErrNotExist) {
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

// openPinned opens the objects that Pin left in dir. The opening process allocates the slots, so
// there may be only one.
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
		f.unbased = true
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
	// A process that died left its connections in the map.
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
	f.baseline = f.total()
	return f, nil
}

// lockDir excludes other processes from a pin directory until the file is closed.
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
