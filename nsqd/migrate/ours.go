package migrate

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsqd/commitlog"
)

// Before there were logs, a topic's own line was in a queue called "topic#", a channel's
// in "topic#channel"; with a second #, what was in memory when the process ended, which
// comes before. With oldUnreadable behind such a name, what could not be parsed.
const (
	oldSuffix     = ".queue"
	oldUnreadable = "##unreadable"
)

// findOurs finds the queues of releases before there were logs.
func (im *importer) findOurs(topics topics) error {
	entries, err := os.ReadDir(im.Messages)
	if err != nil {
		return err
	}
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), oldSuffix)
		if !ok || !strings.Contains(name, "#") && !e.IsDir() {
			continue
		}
		path := filepath.Join(im.Messages, e.Name())
		if err := is(fs.ModeDir, path); err != nil {
			return err
		}
		if of, aside := strings.CutSuffix(name, oldUnreadable); aside && strings.Contains(of, "#") {
			for range commitlog.OldQueue(commitlog.OS(), path) {
				im.report.Unreadable++
			}
			im.Logger.Error("messages that an earlier release could not read are kept", "in", path+unreadSuffix)
			if err := setAside(path, path+unreadSuffix); err != nil {
				return err
			}
			continue
		}
		topic, channel, found := strings.Cut(name, "#")
		channel, first := strings.CutPrefix(channel, "#")
		if !found || !valid(topic, channel) {
			im.Logger.Error("there is a queue that is no topic's or channel's; it is left alone", "queue", e.Name())
			continue
		}
		lines := topics.of(topic)
		if first {
			lines[channel] = append([]source{im.ours(name)}, lines[channel]...)
		} else {
			lines[channel] = append(lines[channel], im.ours(name))
		}
	}
	return nil
}

func (im *importer) ours(name string) source {
	path := filepath.Join(im.Messages, name+oldSuffix)
	queue := commitlog.OldQueue(commitlog.OS(), path)
	records := func(yield func(commitlog.Record, error) bool) {
		for data, err := range queue {
			r := commitlog.Record{}
			if err == nil {
				r, err = parseOurs(data, strings.HasSuffix(name, "#"))
			}
			if !yield(r, err) {
				return
			}
		}
	}
	if strings.Contains(name, "##") {
		records = once(records)
	}
	return source{records: records, paths: []string{path}, bad: hasBad(path)}
}

// hasBad reports whether something in the folder was set aside as damaged.
func hasBad(path string) bool {
	entries, err := os.ReadDir(path)
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".bad") {
			return true
		}
	}
	return err != nil
}

// once gives each message of what was in memory once: a process that was killed while
// it left it has left some of it twice, the second time with its later attempts.
func once(all iter.Seq2[commitlog.Record, error]) iter.Seq2[commitlog.Record, error] {
	type key struct {
		id [16]byte
		at mono.Wall
	}
	return func(yield func(commitlog.Record, error) bool) {
		var records []commitlog.Record
		at := map[key]int{}
		for r, err := range all {
			if err != nil {
				if !yield(r, err) {
					return
				}
				continue
			}
			r.Body = append([]byte(nil), r.Body...)
			k := key{r.ID, r.Timestamp}
			if i, twice := at[k]; twice {
				records[i] = r
				continue
			}
			at[k] = len(records)
			records = append(records, r)
		}
		for _, r := range records {
			if !yield(r, nil) {
				return
			}
		}
	}
}

// parseOurs reads a message of an old queue:
//
//	 0  1  version, 1
//	 1  1  source of the arrival time
//	 2  2  attempts so far
//	 4  4  reserved
//	 8 16  message id
//	24  8  timestamp, 32 8 arrival, ns since the Unix epoch
//	40  8  access delay in ns; -1 while it waits for its token
//	48  8  deferral in ns, from the arrival on
//	56     body
//
// The body is a part of b. waits says that it is of a topic's own line.
func parseOurs(b []byte, waits bool) (commitlog.Record, error) {
	if len(b) < 56 || b[0] != 1 || int(b[1]) >= stamp.Sources {
		return commitlog.Record{}, fmt.Errorf("message of %d bytes: %w: unknown version", len(b), commitlog.ErrUnreadable)
	}
	r := commitlog.Record{
		ID:        [16]byte(b[8:24]),
		Timestamp: mono.Wall(binary.BigEndian.Uint64(b[24:])),
		Arrival:   mono.Wall(binary.BigEndian.Uint64(b[32:])),
		Source:    stamp.Source(b[1]),
		Attempts:  binary.BigEndian.Uint16(b[2:]),
		Body:      b[56:],
	}
	access, deferral := time.Duration(binary.BigEndian.Uint64(b[40:])), time.Duration(binary.BigEndian.Uint64(b[48:]))
	if deferral < 0 {
		return commitlog.Record{}, errors.Join(commitlog.ErrUnreadable, fmt.Errorf("message with a deferral of %v", deferral))
	}
	if access >= 0 && !waits {
		r.Access = access + 1
	}
	if deferral > 0 {
		r.Due = r.Arrival + mono.Wall(deferral)
	}
	return r, nil
}
