package agent

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/srtm-io/srtm/nsqd/durable"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Base is a base share that a broker may restore after a restart.
type Base struct {
	Topic string
	Epoch uint64 // epoch of the grant
	Share tokenbucket.Share
}

// Store keeps bases. Save and Remove return when the change is on stable storage. One goroutine uses a
// Store.
type Store interface {
	Load() ([]Base, error)
	Save(Base) error
	// Remove succeeds if there is no base of the topic.
	Remove(topic string) error
	// Alone reports whether the previous process ended after SetAlone(true).
	Alone() (bool, error)
	// SetAlone stores whether this process has lost the adaptor for so long that a later process may
	// use the bases. SetAlone returns when the note is on stable storage.
	SetAlone(is bool) error
	// Keep stores the loaddistributor's record of a topic, for Kept. An empty record deletes the stored
	// record. A crash of the machine may lose the record.
	Keep(topic string, record []byte) error
	// Kept returns nothing if there is no readable record.
	Kept(topic string) []byte
}

// Files is a Store with one file for each topic:
//
//	{"version":1,"topic":"t","epoch":17,"rate_milli":4000000,"burst":20}
//
// and one file for each record of the loaddistributor. Files replaces a file as a whole.
type Files struct {
	dir   string
	fresh bool // OpenFiles created the folder
}

const storeVersion = 1

type record struct {
	Version   int    `json:"version"`
	Topic     string `json:"topic"`
	Epoch     uint64 `json:"epoch"`
	RateMilli int64  `json:"rate_milli"`
	Burst     int64  `json:"burst"`
}

const (
	suffix = ".json"
	kepts  = ".kept"
)

// OpenFiles returns the Files in the folder dir. OpenFiles creates a missing folder.
func OpenFiles(dir string) (*Files, error) {
	_, err := os.Stat(dir)
	fresh := errors.Is(err, fs.ErrNotExist)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("shares: %w", err)
	}
	return &Files{dir, fresh}, nil
}

// Fresh reports whether OpenFiles created the folder: the broker has never been in a cluster.
func (f *Files) Fresh() bool { return f.fresh }

// path returns the path of a topic's file. The control plane may have sent any topic name.
func (f *Files) path(topic, suffix string) (string, error) {
	name := topic + suffix
	if filepath.Base(name) != name {
		return "", fmt.Errorf("topic %q is no name of a file", topic)
	}
	return filepath.Join(f.dir, name), nil
}

// Load implements Store. An unreadable file is an error: ignoring the file would be safe, but would
// hide the problem.
func (f *Files) Load() ([]Base, error) {
	entries, err := os.ReadDir(f.dir)
	if err != nil {
		return nil, fmt.Errorf("shares: %w", err)
	}
	var bases []Base
	var errs []error
	for _, e := range entries {
		path := filepath.Join(f.dir, e.Name())
		switch {
		case strings.HasSuffix(e.Name(), durable.Temporary): // left by a killed process
			errs = append(errs, os.Remove(path))
		case strings.HasSuffix(e.Name(), suffix):
			data, err := os.ReadFile(path)
			if err == nil {
				var b Base
				if b, err = parseBase(data); err == nil && b.Topic+suffix != e.Name() {
					err = fmt.Errorf("it is of topic %q", b.Topic)
				}
				bases = append(bases, b)
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("shares: %s: %w; without the file the topic waits for a new grant", path, err))
			}
		}
	}
	return bases, errors.Join(errs...)
}

func parseBase(data []byte) (Base, error) {
	var r record
	if err := json.Unmarshal(data, &r); err != nil {
		return Base{}, err
	}
	b := Base{Topic: r.Topic, Epoch: r.Epoch, Share: tokenbucket.Share{Rate: tokenbucket.Rate(r.RateMilli), Burst: r.Burst}}
	if r.Version != storeVersion {
		return Base{}, fmt.Errorf("version %d, this program knows %d", r.Version, storeVersion)
	}
	if err := b.Share.Validate(); err != nil {
		return Base{}, err
	}
	if b.Topic == "" || b.Epoch == 0 || b.Share.IsZero() {
		return Base{}, fmt.Errorf("topic %q, epoch %d, share %+v: none may be empty", b.Topic, b.Epoch, b.Share)
	}
	return b, nil
}

// Save implements Store.
func (f *Files) Save(b Base) error {
	path, err := f.path(b.Topic, suffix)
	if err != nil {
		return fmt.Errorf("share: %w", err)
	}
	data, err := json.Marshal(record{storeVersion, b.Topic, b.Epoch, int64(b.Share.Rate), b.Share.Burst})
	if err != nil {
		return fmt.Errorf("share of %s: %w", b.Topic, err)
	}
	if err := durable.Replace(path, append(data, '\n')); err != nil {
		return fmt.Errorf("share of %s: %w", b.Topic, err)
	}
	return nil
}

// aloneFile exists while SetAlone(true) holds.
const aloneFile = "alone"

// Alone implements Store.
func (f *Files) Alone() (bool, error) {
	_, err := os.Stat(filepath.Join(f.dir, aloneFile))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("shares: %w", err)
	}
	return true, nil
}

// SetAlone implements Store.
func (f *Files) SetAlone(is bool) error {
	path := filepath.Join(f.dir, aloneFile)
	var err error
	if is {
		err = durable.Write(path, nil)
	} else {
		err = f.remove(path)
	}
	if err != nil {
		return fmt.Errorf("shares: %w", err)
	}
	return nil
}

// Remove implements Store.
func (f *Files) Remove(topic string) error {
	path, err := f.path(topic, suffix)
	if err == nil {
		err = f.remove(path)
	}
	if err != nil {
		return fmt.Errorf("share of %s: %w", topic, err)
	}
	return nil
}

// remove deletes a file and returns when the deletion is on stable storage. A missing file is no error.
func (f *Files) remove(path string) error {
	return errors.Join(remove(path), durable.SyncDir(f.dir))
}

func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Keep implements Store. Keep does not sync: there may be thousands of records at once.
func (f *Files) Keep(topic string, record []byte) error {
	path, err := f.path(topic, kepts)
	if err != nil {
		return fmt.Errorf("record: %w", err)
	}
	switch {
	case len(record) == 0:
		return remove(path)
	case bytes.Equal(record, f.Kept(topic)): // after a restart of the loaddistributor, most records
		return nil
	}
	err = os.WriteFile(path+durable.Temporary, record, 0o600)
	if err == nil {
		err = os.Rename(path+durable.Temporary, path)
	}
	if err != nil {
		return fmt.Errorf("record of %s: %w", topic, errors.Join(err, remove(path+durable.Temporary)))
	}
	return nil
}

// Kept implements Store.
func (f *Files) Kept(topic string) []byte {
	path, err := f.path(topic, kepts)
	if err != nil {
		return nil
	}
	record, err := os.ReadFile(path)
	if err != nil {
		return nil
	}
	return record
}
