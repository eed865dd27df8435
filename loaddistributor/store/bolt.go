package store

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"

	"github.com/srtm-io/srtm/loaddistributor/catalog"
)

// Bolt keeps events in one file, which one process at a time has open.
type Bolt struct {
	alone
	path string
}

// boltFile is the name of the file in the data path.
const boltFile = "loaddistributor.db"

// Buckets of the file. events has a key for each event, its version in eight
// bytes, most significant first; snapshot has two keys, the dump and its additions,
// and events begin after its version. term has one key, the number of the newest term.
var (
	bucketEvents   = []byte("events")
	bucketSnapshot = []byte("snapshot")
	keySnapshot    = []byte("dump")
	keyAdditions   = []byte("additions")
	bucketTerm     = []byte("term")
	keyNumber      = []byte("number")
)

// lockPause is how long one attempt at the file's lock takes.
const lockPause = 50 * time.Millisecond

// NewBolt returns a store in a folder, which it makes if need be. It opens
// nothing yet.
func NewBolt(dir string) (*Bolt, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("data path: %w", err)
	}
	return &Bolt{path: filepath.Join(dir, boltFile)}, nil
}

// Lead implements Store: it waits for the file's lock.
func (b *Bolt) Lead(ctx context.Context, _ string) (Term, *catalog.Catalog, error) {
	var db *bbolt.DB
	for {
		var err error
		db, err = bbolt.Open(b.path, 0o600, &bbolt.Options{Timeout: lockPause, FreelistType: bbolt.FreelistMapType})
		if err == nil {
			break
		}
		if !errors.Is(err, bolterrors.ErrTimeout) {
			return nil, nil, fmt.Errorf("open %s: %w", b.path, err)
		}
		if ctx.Err() != nil {
			return nil, nil, fmt.Errorf("%s is in use by another process: %w", b.path, context.Cause(ctx))
		}
	}
	cat, err := read(db)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("%s: %w", b.path, err), db.Close())
	}
	number, err := begin(db)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("%s: %w", b.path, err), db.Close())
	}
	return &boltTerm{newTerm(number, cat), db}, cat, nil
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
		if cat, err = load(tx.Bucket(bucketSnapshot).Get(keySnapshot), tx.Bucket(bucketSnapshot).Get(keyAdditions)); err != nil {
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

// begin writes down the number of a new term, and returns it.
func begin(db *bbolt.DB) (number uint64, err error) {
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
	db *bbolt.DB
}

func versionKey(v uint64) []byte { return binary.BigEndian.AppendUint64(nil, v) }

// Append implements Term: one transaction, which bbolt syncs.
func (t *boltTerm) Append(_ context.Context, base uint64, events []catalog.Event) error {
	records, err := t.records(base, events)
	if err != nil {
		return err
	}
	err = t.db.Update(func(tx *bbolt.Tx) error {
		bucket := tx.Bucket(bucketEvents)
		bucket.FillPercent = 0.9 // keys only grow
		for i, r := range records {
			if err := bucket.Put(versionKey(base+1+uint64(i)), r); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("append to %s: %w", t.db.Path(), err)
	}
	t.head += uint64(len(records))
	return nil
}

// Compact implements Term.
func (t *boltTerm) Compact(_ context.Context, d catalog.Dump) error {
	dump, added, err := t.dump(d)
	if err != nil {
		return err
	}
	err = t.db.Update(func(tx *bbolt.Tx) error {
		if err := tx.Bucket(bucketSnapshot).Put(keySnapshot, dump); err != nil {
			return err
		}
		if err := tx.Bucket(bucketSnapshot).Put(keyAdditions, added); err != nil {
			return err
		}
		cursor := tx.Bucket(bucketEvents).Cursor()
		// First again and again: Next skips a key after a Delete.
		for k, _ := cursor.First(); k != nil && binary.BigEndian.Uint64(k) <= d.Version; k, _ = cursor.First() {
			if err := cursor.Delete(); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("compact %s: %w", t.db.Path(), err)
	}
	return nil
}

// Resign implements Term: it closes the file.
func (t *boltTerm) Resign(context.Context) error {
	if t.over {
		return nil
	}
	t.over = true
	return t.db.Close()
}
