package store

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime/debug"
	"syscall"
	"time"

	"go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
)

// Bolt stores events in one file. One process at a time has the file open.
type Bolt struct {
	alone
	path string
	log  *slog.Logger
}

// boltFile is the name of the file in the data path.
const boltFile = "loaddistributor.db"

// Buckets of the file:
//   - events has a key for each event after the snapshot: its version in eight bytes,
//     most significant first.
//   - snapshot has one key, the dump.
//   - term has one key, the number of the newest term.
var (
	bucketEvents   = []byte("events")
	bucketSnapshot = []byte("snapshot")
	keySnapshot    = []byte("dump")
	bucketTerm     = []byte("term")
	keyNumber      = []byte("number")
)

// Lead tries to lock the file every lockPause for lockPatience, because a previous
// process may be about to end. Each attempt of bbolt takes lockAttempt.
const (
	lockPatience = 10 * time.Second
	lockPause    = 200 * time.Millisecond
	lockAttempt  = 50 * time.Millisecond
)

// DamagedError: the file is damaged.
type DamagedError struct {
	Path  string
	Cause any // value of bbolt's panic
}

func (e *DamagedError) Error() string {
	return fmt.Sprintf("%s is damaged (%v): put a copy in its place, or move the file away, start with an empty one and bring back an export with srtm cluster import (docs/backup.md)", e.Path, e.Cause)
}

// guard runs f, which reads or writes the file. A damaged page makes bbolt panic or the
// kernel send SIGBUS. In both cases guard returns *DamagedError.
func (b *Bolt) guard(f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if cause := recover(); cause != nil {
			err = &DamagedError{b.path, cause}
		}
	}()
	return f()
}

// NewBolt returns a store in a folder and creates a missing folder. It does not open the
// file yet.
func NewBolt(dir string, log *slog.Logger) (*Bolt, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("data path: %w", err)
	}
	return &Bolt{path: filepath.Join(dir, boltFile), log: log}, nil
}

// Lead implements Store. It waits at most lockPatience for the file's lock.
func (b *Bolt) Lead(ctx context.Context, _ string) (Term, *catalog.Catalog, error) {
	db, err := b.open(ctx)
	if err != nil {
		return nil, nil, err
	}
	var cat *catalog.Catalog
	var number uint64
	err = b.guard(func() (err error) {
		if cat, err = read(db); err == nil {
			number, err = beginTerm(db)
		}
		return err
	})
	if errors.As(err, new(*DamagedError)) {
		return nil, nil, err // the file stays open, because closing could hang
	}
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("%s: %w", b.path, err), db.Close())
	}
	return &boltTerm{newTerm(number, cat), b, db}, cat, nil
}

// open opens the file once its lock is free.
func (b *Bolt) open(ctx context.Context) (db *bbolt.DB, err error) {
	end := clock.Mono().Add(lockPatience)
	for logged := false; ; {
		err = b.guard(func() (err error) {
			db, err = bbolt.Open(b.path, 0o600, &bbolt.Options{Timeout: lockAttempt, FreelistType: bbolt.FreelistMapType})
			return err
		})
		switch {
		case err == nil:
			return db, nil
		case errors.As(err, new(*DamagedError)):
			return nil, err
		case !errors.Is(err, bolterrors.ErrTimeout):
			return nil, fmt.Errorf("open %s: %w", b.path, err)
		}
		used := fmt.Sprintf("%s is in use by %s", b.path, lockOwner(b.path))
		if !clock.Mono().Before(end) {
			return nil, fmt.Errorf("%s: stop that process, or give this one another --data-path", used)
		}
		if !logged {
			logged = true
			b.log.Warn("the store is in use; waiting for its lock", obs.KeyError, used, "patience", lockPatience)
		}
		if !clock.Sleep(ctx, lockPause) {
			return nil, fmt.Errorf("%s: %w", used, context.Cause(ctx))
		}
	}
}

func read(db *bbolt.DB) (*catalog.Catalog, error) {
	err := db.Update(func(tx *bbolt.Tx) error {
		_, err := tx.CreateBucketIfNotExists(bucketEvents)
		if err == nil {
			_, err = tx.CreateBucketIfNotExists(bucketSnapshot)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	var cat *catalog.Catalog
	err = db.View(func(tx *bbolt.Tx) (err error) {
		if cat, err = load(tx.Bucket(bucketSnapshot).Get(keySnapshot)); err != nil {
			return err
		}
		return tx.Bucket(bucketEvents).ForEach(func(k, v []byte) error {
			if len(k) != 8 {
				return fmt.Errorf("a key of %d bytes among the events", len(k))
			}
			return replay(cat, binary.BigEndian.Uint64(k), v)
		})
	})
	return cat, err
}

// beginTerm records and returns the number of a new term.
func beginTerm(db *bbolt.DB) (number uint64, err error) {
	err = db.Update(func(tx *bbolt.Tx) error {
		bucket, err := tx.CreateBucketIfNotExists(bucketTerm)
		if err != nil {
			return err
		}
		if last := bucket.Get(keyNumber); len(last) == 8 {
			number = binary.BigEndian.Uint64(last)
		} else if last != nil {
			return fmt.Errorf("a term's number of %d bytes", len(last))
		}
		number = numberAfter(number)
		return bucket.Put(keyNumber, versionKey(number))
	})
	return number, err
}

type boltTerm struct {
	term
	store *Bolt
	db    *bbolt.DB
}

// noRoom reports whether err means that the disk has no room for a growing file.
func noRoom(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) || errors.Is(err, syscall.EFBIG)
}

// absent reports whether the file certainly does not have an event and never will: bbolt
// did not write the page that commits the transaction.
func (t *boltTerm) absent(version uint64) bool {
	exists := true
	err := t.store.guard(func() error {
		return t.db.View(func(tx *bbolt.Tx) error {
			exists = tx.Bucket(bucketEvents).Get(versionKey(version)) != nil
			return nil
		})
	})
	return err == nil && !exists
}

func versionKey(v uint64) []byte { return binary.BigEndian.AppendUint64(nil, v) }

// Append implements Term with one transaction, which bbolt syncs.
func (t *boltTerm) Append(_ context.Context, base uint64, events []catalog.Event) error {
	records, err := t.records(base, events)
	if err != nil {
		return err
	}
	err = t.store.guard(func() error {
		return t.db.Update(func(tx *bbolt.Tx) error {
			bucket := tx.Bucket(bucketEvents)
			bucket.FillPercent = 0.9 // keys only grow
			for i, r := range records {
				if err := bucket.Put(versionKey(base+1+uint64(i)), r); err != nil {
					return err
				}
			}
			return nil
		})
	})
	if err != nil && noRoom(err) && t.absent(base+1) {
		return fmt.Errorf("append to %s: %w: %w", t.db.Path(), ErrFull, err)
	}
	if err != nil {
		return fmt.Errorf("append to %s: %w", t.db.Path(), err)
	}
	t.head += uint64(len(records))
	return nil
}

// Compact implements Term.
func (t *boltTerm) Compact(_ context.Context, d catalog.Dump) error {
	dump, err := t.dump(d)
	if err != nil {
		return err
	}
	err = t.store.guard(func() error { return t.db.Update(replace(dump, d.Version)) })
	if err != nil {
		return fmt.Errorf("compact %s: %w", t.db.Path(), err)
	}
	return nil
}

// replace replaces all events up to a version with a dump.
func replace(dump []byte, version uint64) func(*bbolt.Tx) error {
	return func(tx *bbolt.Tx) error {
		if err := tx.Bucket(bucketSnapshot).Put(keySnapshot, dump); err != nil {
			return err
		}
		cursor := tx.Bucket(bucketEvents).Cursor()
		// First each time, because Next skips a key after a Delete.
		for k, _ := cursor.First(); k != nil && binary.BigEndian.Uint64(k) <= version; k, _ = cursor.First() {
			if err := cursor.Delete(); err != nil {
				return err
			}
		}
		return nil
	}
}

// Resign implements Term. It closes the file.
func (t *boltTerm) Resign(context.Context) error {
	if t.ended {
		return nil
	}
	t.ended = true
	return t.db.Close()
}
