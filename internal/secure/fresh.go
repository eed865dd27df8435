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

// checkEvery is how often files are looked at, at most: when they are used, so
// that nothing runs where nothing is asked.
const checkEvery = time.Second

// demands counts the calls of ReadAgain.
var demands atomic.Uint64

// ReadAgain has all token files and certificates of the process read again at their next
// use, also files that look unchanged, and lists of revoked certificates at once.
func ReadAgain() {
	demands.Add(1)
	again.Lock()
	all := slices.Clone(again.readers)
	again.Unlock()
	for _, read := range all {
		read()
	}
}

// again has what ReadAgain reads at once: of each server of the process, which live as long.
var again struct {
	sync.Mutex
	readers []func()
}

func onReadAgain(read func()) {
	again.Lock()
	defer again.Unlock()
	again.readers = append(again.readers, read)
}

// fresh is what was read from files, and is read again when they have changed. A
// file that cannot be read, or half a pair, leaves what there was: the next look
// that finds another state tries again. Methods are for any goroutine.
type fresh[T any] struct {
	// Set once.
	files []string
	read  func() (T, error)
	now   func() time.Time
	log   *atomic.Pointer[slog.Logger] // nil inside: not logged

	// Atomic: written by the goroutine that looks. One that reads an older value meets a
	// handshake or a call that came a moment earlier.
	value atomic.Pointer[T]
	// due is when to look again, in Unix nanoseconds; the goroutine that moves it looks, but
	// for while another still does: the last to look is the last to store.
	due     atomic.Int64
	looking atomic.Bool
	// seen is the state of the files that was tried last. Written by the goroutine that looks.
	seen atomic.Pointer[[]state]
	// demand is the value of demands at the last look. Written by the goroutine that looks.
	demand atomic.Uint64
}

// state is what tells a file from the one it was.
type state struct {
	info fs.FileInfo
	gone bool
}

func (s state) same(o state) bool {
	if s.gone || o.gone {
		return s.gone == o.gone
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
	states := f.states() // before they are read: a change meanwhile is seen later
	value, err := read()
	if err != nil {
		return nil, err
	}
	f.value.Store(&value)
	f.seen.Store(&states)
	f.due.Store(f.now().Add(checkEvery).UnixNano())
	return f, nil
}

// Log says who is told when the files were read again, or could not be.
func (f *fresh[T]) Log(log *slog.Logger) { f.log.Store(log) }

func (f *fresh[T]) states() []state {
	all := make([]state, len(f.files))
	for i, file := range f.files {
		info, err := os.Stat(file)
		all[i] = state{info, err != nil}
	}
	return all
}

// get returns what the files say, as of a second ago at the latest, if they were
// asked then.
func (f *fresh[T]) get() T {
	now := f.now()
	if due := f.due.Load(); now.UnixNano() >= due && f.due.CompareAndSwap(due, now.Add(checkEvery).UnixNano()) || f.demand.Load() != demands.Load() {
		f.look()
	}
	return *f.value.Load()
}

func (f *fresh[T]) look() {
	if !f.looking.CompareAndSwap(false, true) {
		return
	}
	defer f.looking.Store(false)
	demand := demands.Load()
	demanded := f.demand.Swap(demand) != demand
	states := f.states()
	if !demanded && slices.EqualFunc(states, *f.seen.Load(), state.same) {
		return
	}
	f.seen.Store(&states)
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
