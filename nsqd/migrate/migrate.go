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

	"github.com/srtm-io/srtm/internal/durable"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/metadata"
)

// Config says where everything is.
type Config struct {
	Data     string         // the folder with the files of NSQ's nsqd
	Messages string         // the folder of Dir
	Metadata string         // our file of topics and channels
	Dir      *commitlog.Dir // held by this process, with no log open
	// Log is what a topic's log is opened with, without Dir and Name.
	Log commitlog.Config
	// Cursors encodes the first snapshot of a topic's log.
	Cursors func(Topic) []byte
	// Unwanted is why messages cannot be brought in: if there are any it is the error.
	Unwanted error
	Logger   *slog.Logger
}

// Topic is one that was brought in. Each of its channels begins at the beginning of
// the log, with nothing done: what a channel does not need is there for others alone.
type Topic struct {
	Name     string
	Channels []string         // sorted
	Released commitlog.Offset // what is before it had its token
	Next     commitlog.Offset
}

// Report is what was done.
type Report struct {
	Topics   []Topic
	Messages int // records that were written
	// Unreadable counts the places that could not be read. Each is logged, and the file
	// stays under a name with unreadSuffix.
	Unreadable int
}

// NSQ's files stay under another name, so that an operator can return to NSQ: with
// doneSuffix, or with unreadSuffix if a place in the file could not be read.
const (
	doneSuffix   = ".imported"
	unreadSuffix = ".unreadable"

	// workName ends the name of a log that is not complete; no topic has such a name.
	// listName is a file in the log. Each line has a suffix and the path of a file that
	// gets the suffix as soon as the log is complete.
	workName = "##import"
	listName = "imported"
)

// unreadable says that a place in one file of a source cannot be read, and never will.
// The import steps over the place. Any other error ends the import.
type unreadable struct {
	path string // "": the place is in no file that there is
	err  error
}

func (u unreadable) Error() string { return u.err.Error() }
func (u unreadable) Unwrap() error { return u.err }

// source is the queue of a topic or of a channel.
type source struct {
	records iter.Seq2[commitlog.Record, error]
	paths   []string
}

// lines has the queues of one topic: the topic's own under "", the others by channel.
type lines map[string]source

type topics map[string]lines

func (t topics) of(name string) lines {
	if t[name] == nil {
		t[name] = lines{}
	}
	return t[name]
}

// Import brings in what there is. It is called at each start, before logs are opened,
// and does nothing when there is nothing. When it fails, or the process ends, it goes
// on at the next start: a topic is brought in wholly or not at all, and once. Lines that
// were left in order come over exactly; of those of a process that was killed, channels
// may get messages again.
func Import(cfg Config) (Report, error) {
	state, err := metadata.Read(cfg.Metadata)
	if err != nil {
		return Report{}, err
	}
	im := importer{Config: cfg}
	err = im.run(state)
	if im.locked != nil {
		_ = im.locked.Close() // it was only locked
	}
	if err != nil {
		return im.report, fmt.Errorf("import what another nsqd has left: %w", err)
	}
	return im.report, nil
}

type importer struct {
	Config
	report Report
	locked *os.File // Data, if there is something of NSQ's nsqd
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

// finish ends what an earlier start has begun.
func (im *importer) finish() error {
	names, err := im.Dir.Logs()
	if err != nil {
		return err
	}
	for _, name := range names {
		if strings.HasSuffix(name, workName) { // it was not complete
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

// finishTopic disposes of what a topic's log was made of.
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

// maxBody allows for messages of a time when larger ones were allowed.
func (im *importer) maxBody() int { return max(im.Log.MaxBody, commitlog.DefaultMaxBody) }

func (im *importer) folder(log string) string { return filepath.Join(im.Messages, log+".log") }

// dispose renames the files of a list. A file that is missing was renamed before.
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

// setAside renames a file. What an earlier import left under that name stays: then
// the name has a number.
func setAside(path, name string) error {
	for n, to := 1, name; ; n++ {
		if _, err := os.Lstat(to); errors.Is(err, fs.ErrNotExist) {
			return os.Rename(path, to)
		} else if err != nil {
			return err
		}
		to = fmt.Sprintf("%s.%d", name, n)
	}
}

// topic writes a topic's log, and takes it and what it was made of into effect.
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
	im.report.Unreadable += w.lost
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
	im.Logger.Info("messages of another nsqd are in the topic's log now", obs.KeyTopic, t.Name, obs.KeyCount, w.written, "unreadable", w.lost)
	return im.finishTopic(t.Name)
}

// writer puts records into a log, in batches.
type writer struct {
	log    *commitlog.Files
	topic  string
	Logger *slog.Logger

	batch   []commitlog.Record
	bytes   int
	next    commitlog.Offset
	written int
	lost    int
	unread  map[string]bool // paths
}

const (
	batchRecords = 1000
	batchBytes   = 4 << 20
)

// write writes what the channels have, in their order, and what waits for its token. A
// record that the head of each channel's line agrees in is written once, any other for
// one channel alone: a queue for each of them had lost what they have in common, and
// records of a subset are few where channels read at about the same pace.
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
			all = all && h.any && same(h.head, first.head)
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
	own := w.newLine("", lines[""])
	defer own.stop()
	for {
		if err := own.advance(); err != nil {
			return err
		}
		if !own.any {
			err := w.flush()
			t.Next = w.next
			return err
		}
		r := own.head
		r.Attempts = 0
		if err := w.add(r); err != nil {
			return err
		}
	}
}

func same(a, b commitlog.Record) bool {
	return a.ID == b.ID && a.Timestamp == b.Timestamp && a.Attempts == b.Attempts && a.Due == b.Due && bytes.Equal(a.Body, b.Body)
}

// add appends a record, whose body it copies.
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

// newLine returns a line that the caller must stop. A place that cannot be read is counted
// and logged. A channel without a source has no records.
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

// unreadable counts and logs a place that could not be read, and marks its file.
func (w *writer) unreadable(channel string, u unreadable) {
	w.lost++
	if u.path != "" {
		w.unread[u.path] = true
	}
	w.Logger.Error("messages that another nsqd has left are not readable; the file is kept", obs.KeyTopic, w.topic, obs.KeyChannel, channel,
		"suffix", unreadSuffix, obs.KeyError, u)
}

// advance gets the line's next record.
func (l *line) advance() (err error) {
	l.head, err, l.any = l.pull()
	return err
}

// isFile returns an error unless path is a file or a link to a file. Reading of another thing
// may never end, and a link may lead to a disk that is not mounted.
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

// valid reports whether a topic, and a channel if there is one, may have these names and
// is kept on a disk.
func valid(topic, channel string) bool {
	return wire.ValidTopicName(topic) && !wire.Ephemeral(topic) && (channel == "" || wire.ValidChannelName(channel) && !wire.Ephemeral(channel))
}
