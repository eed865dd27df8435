package broker

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/metadata"
	"github.com/srtm-io/srtm/nsqd/migrate"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/nsqd/replicated"
)

// keyPath is the log attribute of a file or folder.
const keyPath = "path"

// StorageConfig configures the storage of messages. A StorageConfig is immutable.
type StorageConfig struct {
	Path         string // folder of messages, created if necessary; used by this process alone
	Metadata     string // file of topics and channels, beside Path
	Data         string // folder in which NSQ's nsqd would have its files; empty: Path
	SegmentBytes int64  // maximum size of a file; 0: commitlog's default
	MaxRecord    int    // maximum size of a message body, in bytes
	Overflow     int    // maximum number of a topic's messages on their way to disk; >= 1
	// OpenFiles is the number of a topic's files that stay open after a read; 0:
	// commitlog's default. ReadAhead is the number of body bytes read at a time for a
	// cursor that is behind; a single message may be larger; 0: DefaultReadAhead.
	OpenFiles, ReadAhead int
	// MaxOpenFiles bounds the open message files of all topics, apart from files in use; 0:
	// unlimited.
	MaxOpenFiles int
	// MaxUnfinished bounds the distance, in messages, of a channel from its oldest
	// unfinished message; 0: unlimited.
	MaxUnfinished int
	// MaxLogBytes is the size of a topic's log, in bytes, from which publications are
	// refused. Messages accepted before are still written. 0: unlimited.
	MaxLogBytes int64
	// Retain is the default retention of topics.
	Retain metadata.Retention
	// WriteThrough writes every message before it is accepted, so messages survive the loss
	// of the process. Without WriteThrough, only messages that do not fit into memory go to
	// disk, and the rest when the broker closes.
	WriteThrough bool
	// Fsync syncs every message before it is accepted, so messages survive a power failure.
	// Fsync implies WriteThrough.
	Fsync bool
	// Replicated stores the logs; nil: logs are files. Replicated implies Fsync: an OK
	// means that most replicas have the message.
	Replicated *replicated.Cluster
	Log        *slog.Logger
	// Disk is the file system; nil: the operating system's.
	Disk *commitlog.Disk
	// Clocks reads both clocks at one moment; nil: internal/clock.
	Clocks func() (mono.Time, mono.Wall)
}

// Storage is the broker's disk. A broker without a Storage keeps messages in memory only,
// and refuses messages that do not fit.
type Storage struct {
	// Set once.
	cfg    StorageConfig
	dir    *commitlog.Dir
	log    *slog.Logger // of faults; limited, since publishers can cause many when the disk is almost full
	endLog func()

	// nextOffsets has the next offset of logs that contain only damaged files, by topic. These
	// files are not read. Written by Restore, before there are connections.
	nextOffsets map[string]queue.Offset

	epoch atomic.Pointer[epoch] // written at the start, and by current

	records sync.Pool // of *[]commitlog.Record, for publishers
	health  health    // has its own lock
}

// OpenStorage locks the folder for this process.
func OpenStorage(cfg StorageConfig) (*Storage, error) {
	if cfg.Overflow < 1 || cfg.Log == nil || cfg.Metadata == "" {
		return nil, fmt.Errorf("storage: %d messages on their way to disk, want at least 1, and a logger, and a file for metadata", cfg.Overflow)
	}
	disk := commitlog.OS()
	if cfg.Disk != nil {
		disk = *cfg.Disk
	}
	dir, err := commitlog.OpenDir(cfg.Path, disk)
	if errors.Is(err, commitlog.ErrInUse) {
		return nil, fmt.Errorf("storage: another nsqd uses %s: %w", filepath.Dir(cfg.Path), err)
	}
	if err != nil {
		return nil, fmt.Errorf("storage: %w", err)
	}
	dir.Bound(cfg.MaxOpenFiles)
	cfg.Fsync = cfg.Fsync || cfg.Replicated != nil
	if cfg.Clocks == nil {
		cfg.Clocks = func() (mono.Time, mono.Wall) { return clock.Mono(), clock.Wall() }
	}
	s := &Storage{cfg: cfg, dir: dir, nextOffsets: make(map[string]queue.Offset)}
	first := s.moment()
	s.epoch.Store(&first)
	s.log, s.endLog = obs.Sparse(cfg.Log)
	s.records.New = func() any { return new([]commitlog.Record) }
	return s, nil
}

// LockID is commitlog.LockID of the locked folder.
func (s *Storage) LockID() string { return commitlog.LockID(s.cfg.Path) }

// moment returns the current epoch.
func (s *Storage) moment() epoch {
	mono, wall := s.cfg.Clocks()
	return epoch{mono: mono, wall: wall}
}

// clockStep is the smallest movement of the wall clock against the monotonic clock that begins a
// new epoch. After a smaller movement, a message of an earlier process seems to be that much
// older or younger.
const clockStep = time.Second

// current returns the epoch for new records. A movement of the wall clock by clockStep begins a new epoch.
func (s *Storage) current() *epoch {
	e, now := s.epoch.Load(), s.moment()
	moved := time.Duration(now.wall - e.wallOf(now.mono))
	if moved.Abs() < clockStep {
		return e
	}
	next := now // not now itself, because next is allocated
	if s.epoch.CompareAndSwap(e, &next) {
		s.cfg.Log.Warn("the wall clock has moved against the monotonic clock: it was set or slewed, or the host was suspended; after a restart, messages stored before now seem older or younger by as much", "moved", moved)
	}
	return s.epoch.Load()
}

// putRecords returns a slice of records to the pool.
func (s *Storage) putRecords(records *[]commitlog.Record) {
	clear(*records)
	*records = (*records)[:0]
	s.records.Put(records)
}

// Close unlocks the folder. Requires: the broker is closed.
func (s *Storage) Close() error {
	s.endLog()
	return s.dir.Close()
}

// openLog is an open log. The parts are one log, which commitlog.Files documents.
type openLog struct {
	commitlog.Log
	extent
	lifetime
}

// extent is what a log keeps, and how much of it is needed.
type extent interface {
	At(mono.Wall) (commitlog.Offset, error)
	Need(from commitlog.Offset) commitlog.Offset
	Records(from commitlog.Offset) int64
	Needed() int64
	Size() int64
	SetRetain(commitlog.Retain)
}

// lifetime is the state and the end of a log.
type lifetime interface {
	Stats() commitlog.Stats
	Rest() error
	Remove() error
	Close() error
}

func (s *Storage) open(topic string) (*openLog, error) {
	if s.cfg.Replicated != nil {
		l, err := s.cfg.Replicated.Open(topic, 0)
		if err != nil {
			return nil, err
		}
		return &openLog{l, l, l}, nil
	}
	c := s.logConfig()
	c.Dir, c.Name = s.dir, topic
	l, err := commitlog.Open(c)
	if err != nil {
		return nil, err
	}
	return &openLog{l, l, l}, nil
}

// closes returns a channel that is closed when the next log is closed or removed.
func (s *Storage) closes() <-chan struct{} {
	if s.cfg.Replicated != nil {
		return s.cfg.Replicated.Closes()
	}
	return s.dir.Closes()
}

// logs returns the logs of an earlier process. The contents of the logs in unavailable are not
// known yet.
func (s *Storage) logs() (names, unavailable []string, err error) {
	names, err = s.dir.Logs()
	if err != nil || s.cfg.Replicated == nil {
		return names, nil, err
	}
	if len(names) > 0 {
		s.cfg.Log.Warn("logs in files are not read while topics are replicated", keyPath, s.cfg.Path, obs.KeyCount, len(names))
	}
	return s.cfg.Replicated.Topics()
}

func (s *Storage) logConfig() commitlog.Config {
	return commitlog.Config{
		SegmentBytes: s.cfg.SegmentBytes,
		MaxBody:      s.cfg.MaxRecord,
		OpenFiles:    s.cfg.OpenFiles,
		Durable:      s.cfg.Fsync,
		Log:          s.cfg.Log,
	}
}

func (s *Storage) readAhead() int { return cmp.Or(s.cfg.ReadAhead, DefaultReadAhead) }

// errFiles: the logs are files, which a broker with replicated logs does not read.
var errFiles = errors.New("messages in files are not imported while topics are replicated; deliver them with another --durability first, or move them away")

// importMessages imports the messages of NSQ's nsqd.
func (s *Storage) importMessages() error {
	var unwanted error
	if s.cfg.Replicated != nil {
		unwanted = errFiles
	}
	report, err := migrate.Import(migrate.Config{
		Unwanted: unwanted,
		Data:     cmp.Or(s.cfg.Data, s.cfg.Path), Messages: s.cfg.Path, Metadata: s.cfg.Metadata,
		Dir: s.dir, Log: s.logConfig(), Logger: s.cfg.Log,
		Cursors: func(t migrate.Topic) []byte {
			return queue.FirstSnapshot(queue.Offset(t.Released), queue.Offset(t.Next), t.Channels)
		},
	})
	if n := len(report.Topics); n > 0 {
		s.cfg.Log.Info("imported the messages of NSQ's nsqd", "topics", n, obs.KeyCount, report.Messages, "unreadable", report.Unreadable)
	}
	return err
}

// Unreadable returns the minimum number of unreadable messages in damaged files, including
// files of earlier processes.
func (b *Broker) Unreadable() (n int64) {
	for _, st := range b.stores() {
		if log := st.log.Load(); log != nil {
			n += int64(log.Stats().Unreadable)
		}
	}
	return n
}

// health holds the current faults of a Storage, one per place. The zero value is healthy.
type health struct {
	mu     sync.Mutex
	faults map[faultKey]error
	probed mono.Time // time of the last disk probe
}

// faultKey identifies the source of a fault: a topic and an operation.
type faultKey struct {
	topic string
	what  operation
}

type operation uint8

const (
	spilling   operation = iota // the store retries and reports the end of the fault
	saving                      // same as spilling
	publishing                  // the next publisher retries, if there is one
	restoring                   // Broker.restoreUnavailable retries
)

// probeEvery is the minimum interval between disk probes, probeSize the bytes of a probe.
const (
	probeEvery = time.Second
	probeSize  = 64 << 10
)

// note records the result of the last attempt.
func (h *health) note(p faultKey, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err == nil {
		delete(h.faults, p)
		return
	}
	if h.faults == nil {
		h.faults = make(map[faultKey]error)
	}
	h.faults[p] = err
}

// forget removes the faults of a deleted topic.
func (h *health) forget(topic string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	maps.DeleteFunc(h.faults, func(p faultKey, _ error) bool { return p.topic == topic })
}

// fault returns one of the current faults. The choice is stable while the fault lasts.
func (h *health) fault() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.faults) == 0 {
		return nil
	}
	first := slices.MinFunc(slices.Collect(maps.Keys(h.faults)), func(a, b faultKey) int {
		return cmp.Or(cmp.Compare(a.topic, b.topic), cmp.Compare(a.what, b.what))
	})
	return fmt.Errorf("queue %s: %w", first.topic, h.faults[first])
}

// stale reports whether only a probe can show the end of a publisher's fault, and the last
// probe is old enough. If so, stale records the time of the probe.
func (h *health) stale(now mono.Time) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if now.Sub(h.probed) < probeEvery {
		return false
	}
	for p := range h.faults {
		if p.what == publishing {
			h.probed = now
			return true
		}
	}
	return false
}

// published removes the faults of publishers.
func (h *health) published() {
	h.mu.Lock()
	defer h.mu.Unlock()
	maps.DeleteFunc(h.faults, func(p faultKey, _ error) bool { return p.what == publishing })
}

// probe tests whether the storage accepts data.
func (s *Storage) probe() error {
	if s.cfg.Replicated != nil {
		return s.cfg.Replicated.Stores()
	}
	return s.dir.Probe(probeSize)
}

// Health returns the reason why the storage is unhealthy, or nil. After a refused
// publication Health probes the disk, at most once a second. Otherwise a broker without
// publishers would remain unhealthy.
func (b *Broker) Health() error {
	st := b.shared.cfg.Storage
	if st == nil {
		return nil
	}
	if st.health.stale(clock.Mono()) && st.probe() == nil {
		st.health.published()
	}
	if err := b.shared.metadataWriter.fault(); err != nil {
		return err
	}
	if st.cfg.Replicated != nil {
		if err := st.cfg.Replicated.Ready(); err != nil {
			return err
		}
	}
	return st.health.fault()
}
