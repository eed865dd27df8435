package migrate

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/metadata"
)

// NSQ's nsqd keeps its topics and channels in nsqd.dat, as JSON. Each queue, named topic or
// topic:channel, keeps its undelivered messages in numbered files. A meta file holds the queue's
// position, which may be seconds old after a crash:
//
//	NAME.diskqueue.NNNNNN.dat   messages: 4 bytes length of the rest, 8 timestamp in
//	                            ns, 2 attempts, 16 id, body; integers big-endian
//	NAME.diskqueue.meta.dat     depth \n number,place to read from \n number,place to write to \n
//
// The files do not record deferrals.
const nsqTopics = "nsqd.dat"

// The maximum sizes of nsqd.dat and of a meta file, in bytes.
const (
	maxTopics = 256 << 20
	maxMeta   = 1 << 10
)

var nsqFile = regexp.MustCompile(`^(.+)\.diskqueue\.([0-9]+|meta)\.dat$`)

// nsqHeader is the size of a message's header, before its body, in bytes.
const nsqHeader = 8 + 2 + 16

type nsqQueue struct {
	topic, channel string
	meta           bool
	files          []uint64
}

// findNSQ finds the files of NSQ's nsqd, and adds its topics and channels to the known ones. list
// names the files to rename once all topics are imported; nil if there are none.
func (im *importer) findNSQ(topics topics, ours metadata.State) (merged metadata.State, list []string, err error) {
	entries, err := os.ReadDir(im.Data)
	if err != nil {
		return ours, nil, err
	}
	queues := map[string]*nsqQueue{}
	for _, e := range entries {
		m := nsqFile.FindStringSubmatch(e.Name())
		if m == nil {
			continue
		}
		topic, channel, isChannel := strings.Cut(m[1], ":")
		n, err := strconv.ParseUint(m[2], 10, 64)
		if !valid(topic, channel) || isChannel && channel == "" || m[2] != "meta" && (err != nil || m[2] != nsqNumber(n)) {
			im.Logger.Error("there is a file of messages that is no topic's or channel's of NSQ's nsqd; it is left alone", "file", e.Name())
			continue
		}
		if err := isFile(filepath.Join(im.Data, e.Name())); err != nil {
			return ours, nil, err
		}
		q := queues[m[1]]
		if q == nil {
			q = &nsqQueue{topic: topic, channel: channel}
			queues[m[1]] = q
		}
		if m[2] == "meta" {
			q.meta = true
		} else {
			q.files = append(q.files, n)
		}
	}
	if _, err := os.Lstat(filepath.Join(im.Data, nsqTopics)); len(queues) > 0 || err == nil {
		if err := im.lock(); err != nil {
			return ours, nil, err
		}
	}
	for name, q := range queues {
		topics.linesOf(q.topic)[q.channel] = im.nsq(name, q)
	}
	merged, found, err := im.nsqTopics(ours)
	if err != nil || !found {
		return merged, nil, err
	}
	return merged, []string{doneSuffix + " " + filepath.Join(im.Data, nsqTopics)}, nil
}

// nsqNumber formats a file's number as in its name.
func nsqNumber(n uint64) string { return fmt.Sprintf("%06d", n) }

// read reads a file of at most most bytes.
func read(path string, limit int64) ([]byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close() // only read
	b, err := io.ReadAll(io.LimitReader(file, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("%s has more than %d bytes", path, limit)
	}
	return b, err
}

// lock ensures until the end of the import that NSQ's nsqd does not use the folder. NSQ's nsqd
// locks the folder itself.
func (im *importer) lock() error {
	folder, err := os.Open(im.Data)
	if err != nil {
		return err
	}
	im.locked = folder
	if err := syscall.Flock(int(folder.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return fmt.Errorf("another process, NSQ's nsqd perhaps, uses %s: %w", im.Data, os.NewSyscallError("flock", err))
	}
	return nil
}

// nsqTopics adds the topics and channels of nsqd.dat to the known ones. Known entries stay
// unchanged.
func (im *importer) nsqTopics(ours metadata.State) (merged metadata.State, found bool, err error) {
	path := filepath.Join(im.Data, nsqTopics)
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return ours, false, nil
	}
	if err := isFile(path); err != nil {
		return ours, false, err
	}
	text, err := read(path, maxTopics)
	var state struct {
		Topics []struct {
			Name     string
			Paused   bool
			Channels []struct {
				Name   string
				Paused bool
			}
		}
	}
	if err == nil {
		err = json.Unmarshal(text, &state)
	}
	if err != nil { // without the list, its channels would miss messages
		return ours, false, fmt.Errorf("%s cannot be read; mend it, or move it away: %w", path, err)
	}
	merged.Topics = slices.Clone(ours.Topics)
	for _, t := range state.Topics {
		if !valid(t.Name, "") {
			im.Logger.Error("nsqd.dat has a topic with a name that no topic can have; it is left out", "topic", t.Name)
			continue
		}
		i := slices.IndexFunc(merged.Topics, func(k metadata.Topic) bool { return k.Name == t.Name })
		if i < 0 {
			i = len(merged.Topics)
			merged.Topics = append(merged.Topics, metadata.Topic{Name: t.Name, Paused: t.Paused})
		}
		into := &merged.Topics[i]
		into.Channels = slices.Clone(into.Channels)
		for _, c := range t.Channels {
			if !valid(t.Name, c.Name) || c.Name == "" {
				im.Logger.Error("nsqd.dat has a channel with a name that no channel can have; it is left out", "topic", t.Name, "channel", c.Name)
				continue
			}
			if !slices.ContainsFunc(into.Channels, func(k metadata.Channel) bool { return k.Name == c.Name }) {
				into.Channels = append(into.Channels, metadata.Channel{Name: c.Name, Paused: c.Paused})
			}
		}
		slices.SortFunc(into.Channels, func(a, b metadata.Channel) int { return strings.Compare(a.Name, b.Name) })
	}
	slices.SortFunc(merged.Topics, func(a, b metadata.Topic) int { return strings.Compare(a.Name, b.Name) })
	return merged, true, nil
}

func (im *importer) nsq(name string, q *nsqQueue) source {
	path := func(suffix string) string { return filepath.Join(im.Data, name+".diskqueue."+suffix+".dat") }
	var s source
	if q.meta {
		s.paths = append(s.paths, path("meta"))
	}
	slices.Sort(q.files)
	for _, n := range q.files {
		s.paths = append(s.paths, path(nsqNumber(n)))
	}
	s.records = func(yield func(commitlog.Record, error) bool) {
		var places nsqPlaces
		if q.meta {
			var err error
			if places, err = readNSQMeta(path("meta")); err != nil && !yield(commitlog.Record{}, err) {
				return
			}
		}
		missing := func(n, before uint64) bool {
			return n >= before || yield(commitlog.Record{}, unreadable{err: fmt.Errorf("%s: not readable: the file is missing, and all before number %d", path(nsqNumber(n)), before)})
		}
		next := places.number
		for i, n := range q.files {
			if n < places.number {
				continue
			}
			if i == 0 && places.number == 0 { // perhaps the meta file is missing: begin with the first file
				next = n
			}
			place := int64(0)
			if n == places.number {
				place = places.place
			}
			if !missing(next, n) || !readNSQ(path(nsqNumber(n)), place, im.maxBody(), yield) {
				return
			}
			next = n + 1
		}
		if places.endPlace > 0 {
			places.end++
		}
		missing(next, places.end)
	}
	return s
}

// nsqPlaces holds the places at which a queue is to be read and ends.
type nsqPlaces struct {
	number, end     uint64 // of files
	place, endPlace int64
}

func readNSQMeta(path string) (p nsqPlaces, err error) {
	text, err := read(path, maxMeta)
	var depth int64 // also read the end: a place with missing digits must not look complete
	if err == nil {
		_, err = fmt.Sscanf(string(text), "%d\n%d,%d\n%d,%d\n", &depth, &p.number, &p.place, &p.end, &p.endPlace)
	}
	if err != nil || p.place < 0 {
		return nsqPlaces{}, unreadable{path, fmt.Errorf("%s: not readable: all messages of the queue come again", path)}
	}
	return p, nil
}

// readNSQ reads the messages of a file, and reports whether to continue with the next file. It
// reads beyond the end in the meta file, because a killed process had accepted the messages
// there.
func readNSQ(path string, start int64, maxBody int, yield func(commitlog.Record, error) bool) (more bool) {
	file, err := os.Open(path)
	if err != nil {
		return yield(commitlog.Record{}, err) && false
	}
	defer file.Close() // only read
	info, err := file.Stat()
	if err == nil {
		_, err = file.Seek(start, io.SeekStart)
	}
	if err != nil {
		return yield(commitlog.Record{}, err) && false
	}
	if start > info.Size() {
		return yield(commitlog.Record{}, unreadable{path, fmt.Errorf("%s: not readable: the file ends at %d, and was read up to %d", path, info.Size(), start)})
	}
	r := bufio.NewReaderSize(file, 1<<20)
	var head [4 + nsqHeader]byte
	var body []byte
	for offset := start; ; {
		n, err := io.ReadFull(r, head[:])
		if n == 0 && errors.Is(err, io.EOF) {
			return true
		}
		size := int64(binary.BigEndian.Uint32(head[:]))
		damaged := err != nil || size < nsqHeader || size-nsqHeader > int64(maxBody) || size > info.Size()-offset
		if !damaged {
			body = slices.Grow(body[:0], int(size-nsqHeader))[:size-nsqHeader]
			_, err = io.ReadFull(r, body)
			damaged = err != nil
		}
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			return yield(commitlog.Record{}, err) && false
		}
		if damaged {
			return yield(commitlog.Record{}, unreadable{path, fmt.Errorf("%s: not readable from %d on", path, offset)})
		}
		offset += 4 + size
		timestamp := mono.Wall(binary.BigEndian.Uint64(head[4:]))
		if !yield(commitlog.Record{
			ID:        [16]byte(head[14:]),
			Timestamp: timestamp,
			Arrival:   timestamp,
			Source:    stamp.Read,
			Attempts:  binary.BigEndian.Uint16(head[12:]),
			Body:      body,
		}, nil) {
			return false
		}
	}
}
