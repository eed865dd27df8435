package broker

import (
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsqd/diskqueue"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/nsqd/wire"
)

// StorageConfig says where messages go that do not fit into memory. Immutable.
type StorageConfig struct {
	Path         string // the folder of messages, created if need be; this process alone uses it
	Metadata     string // the file of topics and channels, beside it
	SegmentBytes int64  // size at which a file is full; 0: diskqueue's default
	MaxRecord    int    // largest body of a message, in bytes
	Overflow     int    // greatest number of messages of a line on their way to disk; >= 1
	// Through writes every message before it is accepted: it then survives the
	// loss of the process. Otherwise only what does not fit into memory goes to
	// disk, and the rest when the broker closes.
	Through bool
	// Fsync has it on stable storage before: it then survives the loss of power,
	// too. It implies Through.
	Fsync bool
	Log   *slog.Logger
	// Disk is where files are; nil means the operating system's.
	Disk *diskqueue.Disk
	// Clocks reads both clocks, at one moment; nil means those of internal/clock.
	Clocks func() (stamp.Mono, stamp.Wall)
}

// Storage is the broker's disk. A broker without one keeps messages in memory
// only and refuses what does not fit.
type Storage struct {
	// Set once.
	cfg   StorageConfig
	dir   *diskqueue.Dir
	epoch epoch

	encoders sync.Pool // of *encoder, of publishers
	health   health    // has a lock of its own

	// Atomic; any goroutine adds: messages in queues of sepUnreadable.
	unreadable atomic.Int64
}

// OpenStorage takes the folder for this process.
func OpenStorage(cfg StorageConfig) (*Storage, error) {
	if cfg.Overflow < 1 || cfg.Log == nil || cfg.Metadata == "" {
		return nil, fmt.Errorf("storage: %d messages on their way to disk, want at least 1, and a logger, and a file for metadata", cfg.Overflow)
	}
	disk := diskqueue.OS()
	if cfg.Disk != nil {
		disk = *cfg.Disk
	}
	dir, err := diskqueue.OpenDir(cfg.Path, disk)
	if errors.Is(err, diskqueue.ErrInUse) {
		return nil, fmt.Errorf("storage: another nsqd uses %s: %w", filepath.Dir(cfg.Path), err)
	}
	if err != nil {
		return nil, fmt.Errorf("storage: %w", err)
	}
	mono, wall := clock.Mono(), clock.Wall()
	if cfg.Clocks != nil {
		mono, wall = cfg.Clocks()
	}
	s := &Storage{cfg: cfg, dir: dir, epoch: epoch{mono: mono, wall: wall}}
	s.encoders.New = func() any { return new(encoder) }
	return s, nil
}

// Close gives the folder back. The broker that uses it must be closed.
func (s *Storage) Close() error { return s.dir.Close() }

// Names of the queues: "topic#" is the topic's own line, "topic#channel" a
// channel's. With a second #, it is what the last process had in memory when it
// ended, which comes before. Names of topics and channels have no # but in
// "#ephemeral", and those never go to disk.
//
// A queue's name with sepUnreadable behind it is that of one with the records of
// the first that could not be parsed. Nobody reads it.
const (
	sepLine       = "#"
	sepResume     = "##"
	sepUnreadable = "##unreadable"
)

func lineName(topic string, c *queue.Channel) string {
	if c == nil {
		return topic + sepLine
	}
	return topic + sepLine + c.Name()
}

func resumeName(topic string, c *queue.Channel) string {
	return strings.Replace(lineName(topic, c), sepLine, sepResume, 1)
}

func (s *Storage) open(name string) (*diskqueue.Queue, error) {
	return diskqueue.Open(diskqueue.Config{
		Dir:          s.dir,
		Name:         name,
		SegmentBytes: s.cfg.SegmentBytes,
		MaxRecord:    recordHeader + s.cfg.MaxRecord,
		Log:          s.cfg.Log,
	})
}

// openEmpty opens a queue of which nothing was restored: what is in it is an earlier
// topic's of that name.
func (s *Storage) openEmpty(name string) (*diskqueue.Queue, error) {
	q, err := s.open(name)
	if err != nil {
		return nil, err
	}
	if n, _ := q.Unread(); n > 0 {
		if err := q.Empty(); err != nil {
			return nil, errors.Join(err, q.Close())
		}
	}
	return q, nil
}

// fault is a record that cannot be parsed.
type fault struct {
	record diskqueue.Record
	err    error
	before int // of how many of those that can be, it was read
}

// putAside keeps records that cannot be parsed, in a queue of their own: they may
// be of a later version.
func (s *Storage) putAside(name string, faulty []fault) error {
	if len(faulty) == 0 {
		return nil
	}
	q, err := s.open(name + sepUnreadable)
	if err != nil {
		return err
	}
	records := make([][]byte, len(faulty))
	for i, f := range faulty {
		records[i] = f.record.Data
	}
	_, err = q.Append(records...)
	if err = errors.Join(err, q.Close()); err != nil {
		return err
	}
	s.unreadable.Add(int64(len(faulty)))
	s.cfg.Log.Error("messages on disk are not readable; they are kept", "queue", name, "in", q.Name(), obs.KeyCount, len(faulty), obs.KeyError, faulty[0].err)
	return nil
}

// Unreadable is how many messages were found on the disk that could not be read,
// by this process and those before it, and are kept in queues of their own.
func (b *Broker) Unreadable() int64 {
	if b.cfg.Storage == nil {
		return 0
	}
	return b.cfg.Storage.unreadable.Load()
}

// count opens a queue and returns how many records it has.
func (s *Storage) count(name string) (int64, error) {
	q, err := s.open(name)
	if err != nil {
		return 0, err
	}
	n, _ := q.Held()
	return n, q.Close()
}

// append encodes messages and puts them at the end of a queue.
func (s *Storage) append(q *diskqueue.Queue, kept []queue.Kept, released bool, scratch *encoder) error {
	scratch.reset()
	for _, k := range kept {
		scratch.add(s.epoch, k, released)
	}
	_, err := q.Append(scratch.records()...)
	return err
}

// encoder holds the records of one append, in one piece of memory.
type encoder struct {
	bytes  []byte
	ends   []int
	slices [][]byte
}

func (e *encoder) reset() { e.bytes, e.ends = e.bytes[:0], e.ends[:0] }

func (e *encoder) add(at epoch, k queue.Kept, released bool) {
	e.bytes = appendRecord(e.bytes, at, k, released)
	e.ends = append(e.ends, len(e.bytes))
}

func (e *encoder) records() [][]byte {
	e.slices = e.slices[:0]
	start := 0
	for _, end := range e.ends {
		e.slices = append(e.slices, e.bytes[start:end])
		start = end
	}
	return e.slices
}

// ErrStorage: the message could not be stored, for now.
var ErrStorage = errors.New("storage failed")

// publishThrough stores messages at the end of the topic's line on disk. They
// are accepted then, and durable after Sync.
func (t *Topic) publishThrough(msgs []*queue.Message, p Published) error {
	t.storing.Lock()
	defer t.storing.Unlock()
	s := t.begin()
	err := t.open()
	if err == nil {
		err = t.mu.core.Admit(t.broker.now(), msgs...)
	}
	sp := t.spiller(t.mu.core.Line())
	t.end(s)
	if err != nil {
		return err
	}
	bytes := 0
	enc := t.broker.cfg.Storage.encoders.Get().(*encoder)
	defer t.broker.cfg.Storage.encoders.Put(enc)
	enc.reset()
	for _, m := range msgs {
		enc.add(t.broker.cfg.Storage.epoch, queue.Kept{Message: m}, false)
		bytes += len(m.Body)
	}
	disk, err := sp.ensure()
	var end diskqueue.Position
	if err == nil {
		end, err = disk.Append(enc.records()...)
	}
	if p.Stored != nil {
		*p.Stored = Stored{end}
	}
	if !errors.Is(err, ErrGone) {
		sp.noted(publishing, err)
	}
	s = t.begin()
	if err != nil {
		err = t.mu.core.Refuse(fmt.Errorf("%w: %w", ErrStorage, err), len(msgs))
	} else {
		t.mu.core.Appended(len(msgs), bytes, &s.fx)
		t.captureLocked(p.From, p.Arrival.At, len(msgs))
	}
	t.end(s)
	return err
}

// Durable reports whether what is published has to be followed by Sync before
// it may be called accepted.
func (t *Topic) Durable() bool { return t.through && t.broker.cfg.Storage.cfg.Fsync }

// Stored is where messages are on the topic's disk.
type Stored struct{ end diskqueue.Position }

// Sync returns when messages that were published before are on stable storage.
// Many callers share one fsync. Errors: ErrStorage, after which nobody knows, and
// which says nothing of what others publish; ErrDraining, likewise.
func (t *Topic) Sync(upTo Stored) error {
	if !t.Durable() {
		return nil
	}
	t.mu.Lock()
	sp := t.spiller(t.mu.core.Line())
	t.mu.Unlock()
	if disk := sp.disk.Load(); disk != nil {
		err := disk.SyncTo(upTo.end)
		switch {
		case err == nil:
		case !errors.Is(err, diskqueue.ErrClosed):
			sp.noted(publishing, err)
			return fmt.Errorf("%w: %w", ErrStorage, err)
		case t.broker.draining.Load():
			return ErrDraining
		} // else the topic was deleted, with what it had accepted
	}
	return nil
}

// Restore brings back the topics and messages that an earlier process left in
// the storage. It is called once, before the broker is used.
func (b *Broker) Restore() error {
	st := b.cfg.Storage
	if st == nil {
		return nil
	}
	if err := b.restoreMetadata(); err != nil {
		return err
	}
	names, err := st.dir.Queues()
	if err != nil {
		return fmt.Errorf("restore: %w", err)
	}
	// The lines of a topic come before its channels could take messages from
	// them: channels first.
	type parts struct{ topic, channel string }
	seen := map[parts]bool{}
	var topics, channels []parts
	for _, name := range names {
		// "t##unreadable" is what memory held of a channel called unreadable.
		if of, aside := strings.CutSuffix(name, sepUnreadable); aside && strings.Contains(of, sepLine) {
			n, err := st.count(name)
			if err != nil {
				return fmt.Errorf("restore: %w", err)
			}
			st.unreadable.Add(n)
			st.cfg.Log.Warn("messages that were not readable are kept", "in", name, obs.KeyCount, n)
			continue
		}
		topic, rest, found := strings.Cut(name, sepLine)
		p := parts{topic, strings.TrimPrefix(rest, sepLine)}
		if !found || !wire.ValidTopicName(p.topic) || p.channel != "" && !wire.ValidChannelName(p.channel) {
			st.cfg.Log.Warn("storage has a queue that is no topic's or channel's; it is left alone", "queue", name)
			continue
		}
		if seen[p] {
			continue
		}
		if !b.has(p.topic, p.channel) { // is there more than files with damage?
			if n, err := st.count(name); err != nil {
				return fmt.Errorf("restore: %w", err)
			} else if n == 0 {
				continue
			}
		}
		seen[p] = true
		if p.channel == "" {
			topics = append(topics, p)
		} else {
			channels = append(channels, p)
		}
	}
	for _, p := range append(channels, topics...) {
		t := b.restoreTopic(p.topic)
		if p.channel != "" {
			if err := t.createChannel(p.channel, true); err != nil {
				return fmt.Errorf("restore channel %s of topic %s: %w", p.channel, p.topic, err)
			}
		}
		if err := t.restoreLine(p.channel); err != nil {
			return err
		}
	}
	b.keeper.begin()
	return nil
}

// has reports whether there is the topic, with that channel if it is not empty.
func (b *Broker) has(topic, channel string) bool {
	t, err := b.Topic([]byte(topic))
	return err == nil && (channel == "" || slices.Contains(t.ChannelNames(), channel))
}

// restoreTopic is CreateTopic without asking anybody for the topic's channels.
// Where a loaddistributor gives the contracts, the topic waits for its share:
// what it held before may be in use elsewhere by now.
func (b *Broker) restoreTopic(name string) *Topic {
	b.mu.Lock()
	defer b.mu.Unlock()
	t := b.mu.topics[name]
	if t == nil {
		t = newTopic(b, name)
		if !b.cfg.AutoCreate {
			t.Limit(SLO{}, false)
		}
		b.mu.topics[name] = t
	}
	return t
}

// restoreLine brings back one line: what was in memory, and what is on disk.
func (t *Topic) restoreLine(channel string) error {
	st := t.broker.cfg.Storage
	s := t.begin()
	defer t.end(s)
	line := t.mu.core.Line()
	if channel != "" {
		line = t.mu.core.Channel(channel).Line()
	}
	sp := t.spiller(line)
	kept, err := sp.resumeLocked()
	if err != nil {
		return err
	}
	disk, err := st.open(lineName(t.name, line.Channel()))
	if err != nil {
		return errors.Join(err, sp.abandonLocked())
	}
	stored, _ := disk.Unread()
	if channel == "" && t.through && stored > 0 {
		if sp.replay, err = t.replayed(disk); err != nil {
			return errors.Join(err, disk.Close(), sp.abandonLocked())
		}
	}
	sp.disk.Store(disk)
	sp.onDisk = int(stored)
	t.mu.core.Restore(t.broker.now(), line, kept, int(stored), &s.fx)
	return nil
}

// resumeLocked reads what the last process had in memory. It stays on the disk
// until it is done with: it may be all there is of it. Requires: topic.mu held; run
// was not started.
func (sp *spiller) resumeLocked() (kept []queue.Kept, err error) {
	q, err := sp.storage().open(resumeName(sp.topic.name, sp.line.Channel()))
	if err != nil {
		return nil, err
	}
	var faulty []fault
	at := make(map[wire.MessageID]int) // in kept
	for {
		records, err := q.Read(1000, 1<<20, nil)
		if err != nil {
			return nil, errors.Join(err, q.Close())
		}
		if len(records) == 0 {
			break
		}
		for _, r := range records {
			k, err := sp.topic.parse(r.Data)
			ticket := sp.resumed.issue(r.End)
			if err != nil {
				faulty = append(faulty, fault{record: r, err: err})
				sp.resumed.done(ticket)
				continue
			}
			k.Ticket = inResume | ticket
			// A process that was killed while it left what was in memory has left some of
			// it twice: without this, each such end would leave more.
			if i, twice := at[k.Message.ID]; twice && kept[i].Message.Timestamp == k.Message.Timestamp {
				sp.resumed.done(kept[i].Ticket &^ inResume)
				kept[i] = k
				continue
			}
			at[k.Message.ID] = len(kept)
			kept = append(kept, k)
		}
	}
	if err := sp.storage().putAside(q.Name(), faulty); err != nil {
		return nil, errors.Join(fmt.Errorf("keep messages that are not readable: %w", err), q.Close())
	}
	if len(kept) == 0 {
		return nil, q.Retire()
	}
	sp.resume.Store(q)
	sp.trackLocked()
	return kept, nil
}

// abandonLocked leaves what resumeLocked read to the next start, since this one has
// failed. Requires: as for resumeLocked.
func (sp *spiller) abandonLocked() error {
	if q := sp.resume.Swap(nil); q != nil {
		return q.Close()
	}
	return nil
}

// persist leaves a line for the next process to restore: what is in memory in
// a queue of its own, since what is on disk comes after it. With needed nothing of
// the line that is on disk goes but what is done with.
// Requires: the topic is closed and the line's spiller has ended.
func (t *Topic) persist(line *queue.Line, sp *spiller, needed bool) error {
	var errs []error
	if _, now := line.TakeOverflow(nil, 0); sp.valid != now { // emptied just before
		errs = append(errs, sp.discard())
	}
	late := sp.pending()
	if len(late) > 0 {
		disk, err := sp.ensure()
		if err == nil {
			err = sp.leave(disk, late)
		}
		errs = append(errs, err)
	}
	if !line.Through() {
		err := sp.leaveMemory(needed)
		if err == nil && !needed && !sp.stays && sp.disk.Load() != nil {
			sp.disk.Load().Release(sp.read) // what was read is in memory, or done with
		}
		errs = append(errs, err)
	} else if q := sp.resume.Load(); q != nil {
		if end, any := sp.resumed.doneUpTo(); any {
			q.Release(end)
		}
		errs = append(errs, q.Close())
	}
	if err := errors.Join(errs...); err != nil && line.Through() {
		return err // the topic's line keeps what this one did not get
	}
	errs = append(errs, sp.close())
	return errors.Join(errs...)
}

// leaveMemory writes what is in memory behind what an earlier process had left of
// it, which goes once that is done, unless it is needed: whenever it ends, nothing
// is missing.
func (sp *spiller) leaveMemory(needed bool) error {
	kept := sp.topic.mu.core.Kept(sp.line)
	q := sp.resume.Load()
	switch {
	case q == nil && len(kept) == 0:
		return nil
	case q == nil:
		var err error
		if q, err = sp.storage().openEmpty(resumeName(sp.topic.name, sp.line.Channel())); err != nil {
			return sp.lost(kept, err)
		}
	case len(kept) == 0 && !needed:
		return q.Retire()
	}
	before, err := q.Append()
	if err == nil {
		err = sp.leave(q, kept)
	}
	if err == nil && !needed {
		q.Release(before)
	} else if end, any := sp.resumed.doneUpTo(); any {
		q.Release(end)
	}
	return errors.Join(err, q.Close())
}

// leave appends messages to one of the line's queues.
func (sp *spiller) leave(q *diskqueue.Queue, kept []queue.Kept) error {
	for rest := kept; len(rest) > 0; {
		n := 0
		for size := 0; n < min(len(rest), 1000) && size < spillBytes; n++ {
			size += rest[n].Message.Size()
		}
		if err := sp.storage().append(q, rest[:n], sp.line.Channel() != nil, &sp.enc); err != nil {
			return sp.lost(rest, err)
		}
		rest = rest[n:]
	}
	return nil
}

// lost says that messages cannot be stored, and how many of them were nowhere else.
func (sp *spiller) lost(messages []queue.Kept, err error) error {
	n := 0
	for _, k := range messages {
		if k.Ticket == 0 && k.Message.Ticket == 0 { // else it is on the disk still, of this line or its topic's
			n++
		}
	}
	return fmt.Errorf("%d messages of %s are lost: %w", n, sp.name(), err)
}
