// Package migrate imports once the messages, topics and channels that NSQ's nsqd has left in a
// folder. It writes the messages into logs. The package knows NSQ's formats, and must not know
// the format of a cursor. nsq.go reads NSQ's files.
package migrate

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/durable"
	"github.com/srtm-io/srtm/nsqd/metadata"
)

// Config holds the import's folders and options.
type Config struct {
	Data     string         // the folder with the files of NSQ's nsqd
	Messages string         // the folder of Dir
	Metadata string         // SRTM's file of topics and channels
	Dir      *commitlog.Dir // open in this process, with no log open
	// Log configures each topic's log, without Dir and Name.
	Log commitlog.Config
	// Cursors encodes the first snapshot of a topic's log.
	Cursors func(Topic) []byte
	// Unwanted is the reason to refuse messages: Import returns Unwanted if there are any
	// messages.
	Unwanted error
	Logger   *slog.Logger
}

// Topic is an imported topic. Each channel begins at the start of the log with no message
// finished. A message that a channel does not need is in the log for other channels only.
type Topic struct {
	Name     string
	Channels []string         // sorted
	Released commitlog.Offset // earlier messages had their tokens
	Next     commitlog.Offset
}

// Report is the result of an import.
type Report struct {
	Topics   []Topic
	Messages int // records written
	// Unreadable counts the unreadable places. Each is logged, and its file stays, renamed with
	// unreadSuffix.
	Unreadable int
}

// NSQ's files stay under another name, so an operator can return to NSQ. The suffix is
// doneSuffix, or unreadSuffix if a place in the file was unreadable.
const (
	doneSuffix   = ".imported"
	unreadSuffix = ".unreadable"

	// workName is the suffix of an incomplete log's name; no topic has such a name. listName is a
	// file in the log. Each line has a suffix and the path of a file. Once the log is complete,
	// the file gets the suffix.
	workName = "##import"
	listName = "imported"
)

// unreadable means that a place in a file is permanently unreadable. The import skips the place.
// Any other error ends the import.
type unreadable struct {
	path string // "": the place is in no existing file
	err  error
}

func (u unreadable) Error() string { return u.err.Error() }
func (u unreadable) Unwrap() error { return u.err }

// source is the queue of a topic or of a channel.
type source struct {
	records iter.Seq2[commitlog.Record, error]
	paths   []string
}

// lines holds the queues of one topic: the topic's own queue under "", the others by channel.
type lines map[string]source

type topics map[string]lines

func (t topics) linesOf(name string) lines {
	if t[name] == nil {
		t[name] = lines{}
	}
	return t[name]
}

// Import imports any files of NSQ's nsqd. Call it at each start, before opening logs; without
// such files Import does nothing. After a failure or the end of the process, the next start
// continues: each topic is imported completely or not at all, and only once. Queues of a cleanly
// stopped nsqd come over exactly. After a killed nsqd, channels may get messages again.
func Import(cfg Config) (Report, error) {
	state, err := metadata.Read(cfg.Metadata)
	if err != nil {
		return Report{}, err
	}
	im := importer{Config: cfg}
	err = im.run(state)
	if im.locked != nil {
		_ = im.locked.Close() // only locked, nothing to flush
	}
	if err != nil {
		return im.report, fmt.Errorf("import what another nsqd has left: %w", err)
	}
	return im.report, nil
}

type importer struct {
	Config
	report Report
	locked *os.File // Data, if it has files of NSQ's nsqd
}

func (im *importer) run(state metadata.State) error {
	if err := im.finish(); err != nil {
		return err
	}
	topics := topics{}
	merged, nsq, err := im.findNSQ(topics, state)
	if err != nil {
		return err
	}
	if im.Unwanted != nil && len(topics) > 0 {
		return fmt.Errorf("%s has messages of %s: %w", im.Data, strings.Join(slices.Sorted(maps.Keys(topics)), ", "), im.Unwanted)
	}
	if nsq != nil {
		if err := metadata.Write(im.Metadata, merged); err != nil {
			return err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(topics)) {
		channels := slices.DeleteFunc(slices.Collect(maps.Keys(topics[name])), func(c string) bool { return c == "" })
		for _, t := range merged.Topics {
			if t.Name == name {
				for _, c := range t.Channels {
					channels = append(channels, c.Name)
				}
			}
		}
		slices.Sort(channels)
		if err := im.topic(Topic{Name: name, Channels: slices.Compact(channels)}, topics[name]); err != nil {
			return fmt.Errorf("topic %s: %w", name, err)
		}
	}
	return im.dispose(nsq)
}

// finish completes the work of an earlier start.
func (im *importer) finish() error {
	names, err := im.Dir.Logs()
	if err != nil {
		return err
	}
	for _, name := range names {
		if strings.HasSuffix(name, workName) { // the log was not complete
			if err := os.RemoveAll(im.folder(name)); err != nil {
				return err
			}
			continue
		}
		if err := im.finishTopic(name); err != nil {
			return fmt.Errorf("finish topic %s: %w", name, err)
		}
	}
	return nil
}

// finishTopic renames the source files of a complete log.
func (im *importer) finishTopic(name string) error {
	list := filepath.Join(im.folder(name), listName)
	text, err := os.ReadFile(list)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = im.dispose(strings.Split(strings.TrimSuffix(string(text), "\n"), "\n"))
	}
	if err == nil {
		err = os.Remove(list)
	}
	return err
}

// maxBody permits messages from a time with a larger limit.
func (im *importer) maxBody() int { return max(im.Log.MaxBody, commitlog.DefaultMaxBody) }

func (im *importer) folder(log string) string { return filepath.Join(im.Messages, log+".log") }

// dispose renames the files of a list. A missing file was renamed before.
func (im *importer) dispose(list []string) error {
	for _, line := range list {
		suffix, path, ok := strings.Cut(line, " ")
		if !ok {
			continue
		}
		if err := setAside(path, path+suffix); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// setAside renames a file. If an earlier import left a file under the new name, setAside adds a
// number.
func setAside(path, name string) error {
	for n, target := 1, name; ; n++ {
		if _, err := os.Lstat(target); errors.Is(err, fs.ErrNotExist) {
			return os.Rename(path, target)
		} else if err != nil {
			return err
		}
		target = fmt.Sprintf("%s.%d", name, n)
	}
}

// topic writes a topic's log, puts the log in place, and renames its source files.
func (im *importer) topic(t Topic, lines lines) error {
	if _, err := os.Stat(im.folder(t.Name)); !errors.Is(err, fs.ErrNotExist) {
		if err == nil {
			err = fmt.Errorf("it has a log, and NSQ's nsqd has written other messages beside it since; let NSQ's nsqd deliver them, or move the log or NSQ's files away")
		}
		return err
	}
	cfg := im.Log
	cfg.Dir, cfg.Name, cfg.MaxBody = im.Dir, t.Name+workName, im.maxBody()
	log, err := commitlog.Open(cfg)
	if err != nil {
		return err
	}
	w := writer{log: log, topic: t.Name, Logger: im.Logger}
	err = w.write(&t, lines)
	if err == nil {
		err = log.SaveCursors(im.Cursors(t))
	}
	if err = errors.Join(err, log.Close()); err != nil {
		return err
	}
	var list []string
	for _, s := range lines {
		for _, path := range s.paths {
			suffix := doneSuffix
			if w.unread[path] {
				suffix = unreadSuffix
			}
			list = append(list, suffix+" "+path)
		}
	}
	im.report.Unreadable += w.damaged
	if w.written == 0 {
		return errors.Join(os.RemoveAll(im.folder(cfg.Name)), im.dispose(list))
	}
	if err := durable.Write(filepath.Join(im.folder(cfg.Name), listName), []byte(strings.Join(list, "\n")+"\n")); err != nil {
		return err
	}
	if err := os.Rename(im.folder(cfg.Name), im.folder(t.Name)); err != nil {
		return err
	}
	if err := durable.SyncDir(im.Messages); err != nil {
		return err
	}
	im.report.Topics = append(im.report.Topics, t)
	im.report.Messages += w.written
	im.Logger.Info("messages of another nsqd are in the topic's log now", obs.KeyTopic, t.Name, obs.KeyCount, w.written, "unreadable", w.damaged)
	return im.finishTopic(t.Name)
}

type writer struct {
	log    *commitlog.Files
	topic  string
	Logger *slog.Logger

	batch   []commitlog.Record
	bytes   int
	next    commitlog.Offset
	written int
	damaged int
	unread  map[string]bool // paths
}

const (
	batchRecords = 1000
	batchBytes   = 4 << 20
)

// write writes the channels' messages in order of time, and then the messages that wait for their
// tokens. If all channels have the same record next, write writes the record once for all
// channels. Otherwise it writes the record for one channel alone. Separate queues per channel
// would lose the common records. Records for one channel are few if the channels read at about
// the same pace.
func (w *writer) write(t *Topic, lines lines) error {
	w.unread = map[string]bool{}
	heads := make([]*line, 0, len(t.Channels))
	defer func() {
		for _, h := range heads {
			h.stop()
		}
	}()
	for _, c := range t.Channels {
		h := w.newLine(c, lines[c])
		heads = append(heads, h)
		if err := h.advance(); err != nil {
			return err
		}
	}
	for {
		first, all := (*line)(nil), true
		for _, h := range heads {
			if !h.any {
				all = false
				continue
			}
			if first == nil || h.head.Timestamp < first.head.Timestamp ||
				h.head.Timestamp == first.head.Timestamp && bytes.Compare(h.head.ID[:], first.head.ID[:]) < 0 {
				first = h
			}
		}
		if first == nil {
			break
		}
		for _, h := range heads {
			all = all && h.any && sameRecord(h.head, first.head)
		}
		r := first.head
		if !all {
			r.Channel = []byte(first.channel)
		}
		if err := w.add(r); err != nil {
			return err
		}
		for _, h := range heads {
			if h == first || all {
				if err := h.advance(); err != nil {
					return err
				}
			}
		}
	}
	if err := w.flush(); err != nil {
		return err
	}
	t.Released = w.next
	topicLine := w.newLine("", lines[""])
	defer topicLine.stop()
	for {
		if err := topicLine.advance(); err != nil {
			return err
		}
		if !topicLine.any {
			err := w.flush()
			t.Next = w.next
			return err
		}
		r := topicLine.head
		r.Attempts = 0
		if err := w.add(r); err != nil {
			return err
		}
	}
}

func sameRecord(a, b commitlog.Record) bool {
	return a.ID == b.ID && a.Timestamp == b.Timestamp && a.Attempts == b.Attempts && a.Due == b.Due && bytes.Equal(a.Body, b.Body)
}

// add appends a record and copies its body.
func (w *writer) add(r commitlog.Record) error {
	r.Body = bytes.Clone(r.Body)
	w.batch = append(w.batch, r)
	w.bytes += len(r.Body)
	if len(w.batch) < batchRecords && w.bytes < batchBytes {
		return nil
	}
	return w.flush()
}

func (w *writer) flush() error {
	first, err := w.log.Append(w.batch)
	if err != nil {
		return err
	}
	w.next = first + commitlog.Offset(len(w.batch))
	w.written += len(w.batch)
	w.batch, w.bytes = w.batch[:0], 0
	return nil
}

// line reads a channel's source.
type line struct {
	channel string
	pull    func() (commitlog.Record, error, bool)
	stop    func()
	head    commitlog.Record
	any     bool
}

// newLine returns a line, which the caller must stop. The line counts and logs unreadable places.
// A channel without a source has no records.
func (w *writer) newLine(channel string, s source) *line {
	l := &line{channel: channel}
	l.pull, l.stop = iter.Pull2(func(yield func(commitlog.Record, error) bool) {
		if s.records == nil {
			return
		}
		for r, err := range s.records {
			if u, ok := errors.AsType[unreadable](err); ok {
				w.unreadable(channel, u)
			} else if !yield(r, err) {
				return
			}
		}
	})
	return l
}

// unreadable counts and logs an unreadable place, and marks its file.
func (w *writer) unreadable(channel string, u unreadable) {
	w.damaged++
	if u.path != "" {
		w.unread[u.path] = true
	}
	w.Logger.Error("messages that another nsqd has left are not readable; the file is kept", obs.KeyTopic, w.topic, obs.KeyChannel, channel,
		"suffix", unreadSuffix, obs.KeyError, u)
}

func (l *line) advance() (err error) {
	l.head, err, l.any = l.pull()
	return err
}

// isFile returns an error unless path is a file or a link to a file. Reading anything else may
// never end, and a link may lead to an unmounted disk.
func isFile(path string) error {
	info, err := os.Stat(path)
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("it is %v", info.Mode())
	}
	if err != nil {
		return fmt.Errorf("%s cannot be read; mend it, or move it away: %w", path, err)
	}
	return nil
}

// valid reports whether the names of a topic and of a channel, if any, are valid and not
// ephemeral.
func valid(topic, channel string) bool {
	return wire.ValidTopicName(topic) && !wire.Ephemeral(topic) && (channel == "" || wire.ValidChannelName(channel) && !wire.Ephemeral(channel))
}
