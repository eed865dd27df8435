package metadata

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"slices"

	"github.com/srtm-io/srtm/internal/durable"
)

// A file of thousands of topics takes a quarter of a second to write. So the changes of a few
// topics are appended to a file of changes beside it, until that is as large. Each line is
//
//	crc32c JSON
//
// with the checksum of the JSON in 8 hexadecimal digits. The first line names the generation of
// the file that the changes belong to. Each other line is what the topic is from then on, or
// only its name if it is gone. Changes of another generation are in the file already.
//
// A crash may leave a part of the lines that were being appended. Nobody was told that these
// are stored.

// changesSuffix follows the name of the file.
const changesSuffix = ".changes"

// minWhole is the size in bytes below which a file is replaced at every change.
const minWhole = 64 << 10

// Change is what a topic is from now on.
type Change struct {
	Name  string `json:"name"`
	Topic *Topic `json:"topic,omitempty"` // nil: there is no such topic
}

type changesHeader struct {
	Version    int    `json:"version"`
	Generation uint64 `json:"generation"`
}

// maxAppend is how many topics are appended at most: the changes of many are not much less than
// the whole file.
const maxAppend = 1000

// Append stores count changes, and returns false if the caller has to Write the whole State: since
// that is as cheap, or the changes cannot be appended. When Append returns true, the changes are
// on stable storage. The caller must not Append again before a Write after it has returned false.
func (f *File) Append(count int, changes iter.Seq[Change]) bool {
	if f.size < f.minWhole || f.changed > f.size || count > maxAppend {
		return false
	}
	var text []byte
	if f.changes == nil {
		text = appendLine(text, changesHeader{version, f.generation})
	}
	for c := range changes {
		if c.Topic != nil && (c.Topic.Name != c.Name || c.Topic.validate() != nil) {
			return false // Write says what is wrong
		}
		text = appendLine(text, c)
	}
	if err := f.append(text); err != nil {
		f.endChanges()
		f.size = 0 // no more until the next Write
		return false
	}
	return true
}

func (f *File) append(text []byte) error {
	if f.changes == nil {
		file, err := os.OpenFile(f.path+changesSuffix, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
		if err != nil {
			return err
		}
		f.changes, f.changed = file, 0
		if err := durable.SyncDir(filepath.Dir(f.path)); err != nil {
			return err
		}
	}
	n, err := f.changes.Write(text)
	f.changed += int64(n)
	return cmp.Or(err, f.changes.Sync())
}

func appendLine(text []byte, value any) []byte {
	line, err := json.Marshal(value)
	if err != nil {
		panic(fmt.Sprintf("metadata: a change that has no JSON: %v", err)) // Marshal fails for types only
	}
	text = append(text, checksum(line)...)
	text = append(text, ' ')
	text = append(text, line...)
	return append(text, '\n')
}

// wholeLines returns the JSON of the lines, without the rest that a crash has left at the end: that
// has no end of a line, or zeros that the disk has not replaced. Error: ErrDamaged.
func wholeLines(text []byte) (all [][]byte, err error) {
	for rest := text; len(rest) > 0; {
		line, after, ended := bytes.Cut(rest, []byte{'\n'})
		sum, value, _ := bytes.Cut(line, []byte{' '})
		if ended && checksum(value) == string(sum) {
			all, rest = append(all, value), after
			continue
		}
		if torn := !bytes.ContainsRune(rest, '\n') || bytes.ContainsRune(rest, 0); !torn {
			return nil, fmt.Errorf("%w: line %d does not have the checksum %.8q", ErrDamaged, len(all)+1, sum)
		}
		for ended { // no line that was stored may follow
			line, after, ended = bytes.Cut(after, []byte{'\n'})
			if sum, value, _ := bytes.Cut(line, []byte{' '}); ended && checksum(value) == string(sum) {
				return nil, fmt.Errorf("%w: line %d, before others that are whole", ErrDamaged, len(all)+1)
			}
		}
		break
	}
	return all, nil
}

// replay returns s with the changes of a file that belongs to the generation. Error: ErrDamaged,
// ErrVersion.
func replay(s State, generation uint64, text []byte) (State, error) {
	all, err := wholeLines(text)
	if err != nil {
		return State{}, err
	}
	if len(all) == 0 { // a crash came before the first line was written
		return s, nil
	}
	var header changesHeader
	if err := json.Unmarshal(all[0], &header); err != nil {
		return State{}, fmt.Errorf("%w: line 1: %w", ErrDamaged, err)
	}
	switch {
	case header.Version != version:
		return State{}, fmt.Errorf("%w: %d, this release knows %d", ErrVersion, header.Version, version)
	case header.Generation > generation:
		return State{}, fmt.Errorf("%w: it follows generation %d of a file whose generation is %d", ErrDamaged, header.Generation, generation)
	case header.Generation < generation:
		return s, nil
	}
	topics := make(map[string]Topic, len(s.Topics))
	for _, t := range s.Topics {
		topics[t.Name] = t
	}
	for i, line := range all[1:] {
		var c Change
		err := json.Unmarshal(line, &c)
		if err == nil && c.Topic != nil && c.Topic.Name != c.Name {
			err = fmt.Errorf("topic %q under the name %q", c.Topic.Name, c.Name)
		}
		if err != nil {
			return State{}, fmt.Errorf("%w: line %d: %w", ErrDamaged, i+2, err)
		}
		if c.Topic == nil {
			delete(topics, c.Name)
		} else {
			topics[c.Name] = *c.Topic
		}
	}
	s.Topics = make([]Topic, 0, len(topics))
	for _, t := range topics {
		s.Topics = append(s.Topics, t)
	}
	slices.SortFunc(s.Topics, func(a, b Topic) int { return cmp.Compare(a.Name, b.Name) })
	if err := s.validate(); err != nil {
		return State{}, fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return s, nil
}
