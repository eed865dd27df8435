package secure

import (
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/internal/obs"
)

// checkEvery is the minimum interval between checks of files. Checks happen on use, so an
// idle program runs no checks.
const checkEvery = time.Second

// demands counts the calls of ReadAgain.
var demands atomic.Uint64

// ReadAgain makes the process reload all token files and certificates at their next use,
// even unchanged files. It reloads lists of revoked certificates at once.
func ReadAgain() {
	demands.Add(1)
	reloads.Lock()
	all := slices.Clone(reloads.readers)
	reloads.Unlock()
	for _, read := range all {
		read()
	}
}

// reloads holds the reload functions that ReadAgain calls, one for each server of the
// process, and one for each OnReadAgain. They live as long as the process.
var reloads struct {
	sync.Mutex
	readers []func()
}

// OnReadAgain makes ReadAgain call read, for files that are not read at each use.
func OnReadAgain(read func()) {
	reloads.Lock()
	defer reloads.Unlock()
	reloads.readers = append(reloads.readers, read)
}

// fresh is a value from files that is reloaded when the files change. If a file is
// unreadable, or only half a pair has changed, the old value stays, and the next check
// that finds another state retries. Any goroutine may call its methods.
type fresh[T any] struct {
	// Set by newFresh.
	files []string
	read  func() (T, error)
	now   func() time.Time
	log   *atomic.Pointer[slog.Logger] // nil inside: not logged

	// Atomic; written by the goroutine that reloads. A stale value only means that a
	// handshake or call counts as a moment earlier.
	value atomic.Pointer[T]
	// due is the time of the next check of the files, in Unix nanoseconds. The goroutine
	// that advances due reloads, unless another goroutine still reloads. So the value of
	// the last reload stays.
	due       atomic.Int64
	reloading atomic.Bool
	// attempted is the state of the files at the last attempt. Written by the goroutine
	// that reloads.
	attempted atomic.Pointer[[]state]
	// demand is the value of demands at the last reload. Written by the goroutine that
	// reloads.
	demand atomic.Uint64
}

// state is the information that reveals a change of a file.
type state struct {
	info    fs.FileInfo
	missing bool
}

func (s state) same(o state) bool {
	if s.missing || o.missing {
		return s.missing == o.missing
	}
	return os.SameFile(s.info, o.info) && s.info.ModTime().Equal(o.info.ModTime()) && s.info.Size() == o.info.Size()
}

// newFresh reads the files for the first time. log may be nil.
func newFresh[T any](log *atomic.Pointer[slog.Logger], read func() (T, error), files ...string) (*fresh[T], error) {
	if log == nil {
		log = &atomic.Pointer[slog.Logger]{}
	}
	f := &fresh[T]{read: read, now: time.Now, log: log}
	f.demand.Store(demands.Load())
	for _, file := range files {
		if file != "" {
			f.files = append(f.files, file)
		}
	}
	states := f.states() // before reading, so a concurrent change is seen later
	value, err := read()
	if err != nil {
		return nil, err
	}
	f.value.Store(&value)
	f.attempted.Store(&states)
	f.due.Store(f.now().Add(checkEvery).UnixNano())
	return f, nil
}

// Log sets the logger for reloads and their failures.
func (f *fresh[T]) Log(log *slog.Logger) { f.log.Store(log) }

func (f *fresh[T]) states() []state {
	all := make([]state, len(f.files))
	for i, file := range f.files {
		info, err := os.Stat(file)
		all[i] = state{info, err != nil}
	}
	return all
}

// get returns the value of the files, at most a second old if the files were used then.
func (f *fresh[T]) get() T {
	now := f.now()
	if due := f.due.Load(); now.UnixNano() >= due && f.due.CompareAndSwap(due, now.Add(checkEvery).UnixNano()) || f.demand.Load() != demands.Load() {
		f.reload()
	}
	return *f.value.Load()
}

func (f *fresh[T]) reload() {
	if !f.reloading.CompareAndSwap(false, true) {
		return
	}
	defer f.reloading.Store(false)
	demand := demands.Load()
	demanded := f.demand.Swap(demand) != demand
	states := f.states()
	if !demanded && slices.EqualFunc(states, *f.attempted.Load(), state.same) {
		return
	}
	f.attempted.Store(&states)
	value, err := f.read()
	if err == nil {
		f.value.Store(&value)
	}
	log := f.log.Load()
	switch {
	case log == nil:
	case err != nil:
		log.Warn("the changed credentials have faults; those before stay in force", obs.KeyError, err)
	default:
		log.Info("credentials read again", "files", f.files)
	}
}
