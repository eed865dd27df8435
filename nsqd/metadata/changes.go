package metadata

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/srtm-io/srtm/nsqd/durable"
)

// A broker with 10,000 topics would write megabytes for each change if each change replaced the whole
// file. A large file therefore has a second file of changes, one record in a line for each write. The
// first line names the checksum of the file that the changes belong to. A whole write makes the changes
// obsolete and then removes them. A crash may cut the last line. The write of a cut line was never
// acknowledged.

const (
	changesSuffix = ".changes"
	// small is the size in bytes up to which a file is always replaced as a whole.
	small = 64 << 10
)

// Change is the new record of a topic, or its end.
type Change struct {
	Topic   *Topic `json:"topic,omitempty"`
	Removed string `json:"removed,omitempty"` // name of a topic without a record
}

// line is a line of the file of changes.
type line struct {
	CRC32C string          `json:"crc32c"`         // of Of or Changes; 8 hexadecimal digits
	Of     string          `json:"of,omitempty"`   // first line: checksum of the file with all topics
	List   json.RawMessage `json:"list,omitempty"` // other lines: []Change
}

// File is the metadata file of a running node. One goroutine uses a File. The first write is a Write.
type File struct {
	path     string
	of       string // checksum of the topics of the last Write; "": Append does nothing
	whole    int64  // bytes of the last Write
	appended int64  // bytes of the file of changes
	changes  *os.File
	written  int64 // bytes of all writes
}

// NewFile returns the File at path. NewFile opens nothing.
func NewFile(path string) *File { return &File{path: path} }

// Write is the function Write.
func (f *File) Write(s State) error {
	f.of = ""
	f.end()
	b, sum, err := encode(s)
	if err != nil {
		return err
	}
	f.written += int64(len(b))
	if err := replace(f.path, b); err != nil {
		return err
	}
	f.of, f.whole = sum, int64(len(b))
	return nil
}

// Append records changes after the last Write. If Append returns true, the changes are on stable storage.
// Otherwise the caller must Write all topics: this write or the last write failed, or the file is small,
// or the changes take more bytes than the file.
func (f *File) Append(changes []Change) (appended bool, err error) {
	if f.of == "" || f.whole <= small || f.appended > f.whole {
		return false, nil
	}
	list, err := json.Marshal(changes)
	if err != nil {
		return false, fmt.Errorf("encode metadata: %w", err)
	}
	if err := f.append(line{CRC32C: checksum(list), List: list}); err != nil {
		f.of = "" // the end of the file is unknown
		f.end()
		return false, fmt.Errorf("write metadata: %w", err)
	}
	return true, nil
}

// append writes a line, after the first line if the file of changes is new.
func (f *File) append(l line) (err error) {
	var b bytes.Buffer
	begins := f.changes == nil
	if begins {
		if f.changes, err = os.OpenFile(f.path+changesSuffix, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600); err != nil {
			return err
		}
		err = json.NewEncoder(&b).Encode(line{CRC32C: checksum([]byte(f.of)), Of: f.of})
	}
	if err = errors.Join(err, json.NewEncoder(&b).Encode(l)); err != nil {
		return err
	}
	n := int64(b.Len())
	f.appended += n
	f.written += n
	if _, err := f.changes.Write(b.Bytes()); err != nil {
		return err
	}
	if err := f.changes.Sync(); err != nil || !begins {
		return err
	}
	return durable.SyncDir(filepath.Dir(f.path))
}

// end closes the file of changes.
func (f *File) end() {
	if f.changes != nil {
		_ = f.changes.Close() // each Append has synced
		f.changes, f.appended = nil, 0
	}
}

// Close writes all topics if the last write was an Append, so that the file has all topics.
func (f *File) Close(all func() State) error {
	if f.changes == nil {
		return nil
	}
	return f.Write(all())
}

// removeChanges removes the file of changes. The next replacement of the file makes the removal durable;
// before, the changes belong to no file.
func removeChanges(path string) error {
	if err := os.Remove(path + changesSuffix); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// apply applies the file of changes, if it belongs to the topics with the checksum sum.
func apply(path, sum string, s State) (State, error) {
	b, err := os.ReadFile(path + changesSuffix)
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return State{}, err
	}
	lines := bytes.SplitAfter(b, []byte("\n"))
	first, ok := parseLine(lines[0])
	if !ok || first.CRC32C != checksum([]byte(first.Of)) || first.Of != sum {
		return s, nil // a crash cut the first line, or the changes belong to an earlier file
	}
	topics := map[string]Topic{}
	for _, t := range s.Topics {
		topics[t.Name] = t
	}
	lines = lines[1:]
	for i, text := range lines {
		l, ok := parseLine(text)
		var list []Change
		if ok = ok && l.CRC32C == checksum(l.List) && json.Unmarshal(l.List, &list) == nil; !ok {
			if rest := bytes.Join(lines[i+1:], nil); len(rest) > 0 {
				return State{}, fmt.Errorf("%w: line %d of the changes", ErrDamaged, i+2)
			}
			break
		}
		for _, c := range list {
			if c.Topic != nil {
				topics[c.Topic.Name] = *c.Topic
			} else {
				delete(topics, c.Removed)
			}
		}
	}
	s.Topics = nil
	// order: sorted below
	for _, t := range topics {
		s.Topics = append(s.Topics, t)
	}
	slices.SortFunc(s.Topics, func(a, b Topic) int { return strings.Compare(a.Name, b.Name) })
	if err := s.validate(); err != nil {
		return State{}, fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return s, nil
}

// parseLine parses a line with its end.
func parseLine(text []byte) (l line, ok bool) {
	return l, bytes.HasSuffix(text, []byte("\n")) && json.Unmarshal(text, &l) == nil
}
