package mqtt

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	nsq "github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsqd/durable"
)

// record is the part of a session that outlives connections and the process. Each session has a file.
type record struct {
	ClientID string
	Owner    string        // authenticated identity; "": any client may use the client id
	Expiry   time.Duration // from the end of the connection
	Filters  []nsq.Filter
	Will     *nsq.Will // published after a crash; nil: none
}

const (
	// maxRecord is the maximum size of a session's file, in bytes.
	maxRecord = 256 << 10
	suffix    = ".json"
)

// store keeps the records of sessions in a folder. Two calls for one client id must not be concurrent.
type store struct {
	folder string
	// writing limits the number of concurrent writes. A write occupies a thread while the disk works, and
	// thousands of clients may connect at once.
	writing chan struct{}
}

// maxWriting is the maximum number of concurrent writes.
const maxWriting = 4

func newStore(folder string) store { return store{folder, make(chan struct{}, maxWriting)} }

func (st store) begin() (end func()) {
	st.writing <- struct{}{}
	return func() { <-st.writing }
}

// path returns the file of a client id, which may have any bytes.
func (st store) path(clientID string) string {
	sum := sha256.Sum256([]byte(clientID))
	return filepath.Join(st.folder, hex.EncodeToString(sum[:16])+suffix)
}

// load returns the record of a session, or nil.
func (st store) load(clientID string) (*record, error) {
	r, err := read(st.path(clientID))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return r, err
}

func read(path string) (*record, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	r := new(record)
	if err := json.Unmarshal(text, r); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return r, nil
}

// save makes a record durable. A record that the file already has costs no write.
func (st store) save(r *record) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if len(text) > maxRecord {
		return fmt.Errorf("the session needs %d bytes, and at most %d bytes are kept", len(text), maxRecord)
	}
	defer st.begin()()
	path := st.path(r.ClientID)
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, text) {
		return nil
	}
	return durable.Replace(path, text)
}

// remove removes the record of a session.
func (st store) remove(clientID string) error {
	defer st.begin()()
	if err := os.Remove(st.path(clientID)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return durable.SyncDir(st.folder)
}

// all returns the records of all sessions, and the faults of unreadable files.
func (st store) all() (records []*record, faults error) {
	entries, err := os.ReadDir(st.folder)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), suffix) {
			continue // a temporary file
		}
		r, err := read(filepath.Join(st.folder, e.Name()))
		if err != nil {
			faults = errors.Join(faults, err)
			continue
		}
		records = append(records, r)
	}
	return records, faults
}
