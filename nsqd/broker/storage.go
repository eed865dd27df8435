package broker

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"

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

// StorageConfig says where messages go that do not fit into memory. Immutable.
type StorageConfig struct {
	Path         string // the folder of messages, created if need be; this process alone uses it
	Metadata     string // the file of topics and channels, beside it
	Data         string // where NSQ's nsqd would have its files; empty: as Path
	SegmentBytes int64  // size at which a file is full; 0: commitlog's default
	MaxRecord    int    // largest body of a message, in bytes
	Overflow     int    // maximum number of messages of a topic on their way to disk; >= 1
	// OpenFiles is how many of a topic's files stay open since they were read last; 0:
	// commitlog's default. ReadAhead is how many bytes of bodies are read at a time for a
	// cursor that is behind, at most unless one message is larger; 0: DefaultReadAhead.
	OpenFiles, ReadAhead int
	// MaxOpenFiles is how many files of messages of all topics are open at a time, beside
	// those in use; 0: they are not bounded.
	MaxOpenFiles int
	// MaxUnfinished is how far a channel may be ahead of the oldest message that it has
	// not finished, in messages; 0: it is not bounded.
	MaxUnfinished int
	// MaxLogBytes is the size of a topic's log, in bytes, from which on publishers are
	// refused; what was accepted before is written all the same. 0: it is not bounded.
	MaxLogBytes int64
	// Retain is the retention of topics that have none of their own.
	Retain metadata.Retention
	// WriteThrough writes every message before it is accepted: it then survives the
	// loss of the process. Otherwise only what does not fit into memory goes to
	// disk, and the rest when the broker closes.
	WriteThrough bool
	// Fsync has it on stable storage before: it then survives the loss of power,
	// too. It implies WriteThrough.
	Fsync bool
	// Replicated is where logs are instead of in files; nil: they are in files. It implies
	// Fsync: an OK says that the message is on most replicas.
	Replicated *replicated.Cluster
	Log        *slog.Logger
	// Disk is where files are; nil means the operating system's.
	Disk *commitlog.Disk
	// Clocks reads both clocks, at one moment; nil means those of internal/clock.
	Clocks func() (mono.Time, mono.Wall)
}

// Storage is the broker's disk. A broker without one keeps messages in memory
// only and refuses what does not fit.
type Storage struct {
	// Set once.
	cfg    StorageConfig
	dir    *commitlog.Dir
	epoch  epoch
	log    *slog.Logger // of faults, which publishers to an almost full disk cause at will
	endLog func()

	// kept has, by topic, where logs go on of which only damaged files are left, that
	// are not read. Written by Restore, before there are connections.
	kept map[string]queue.Offset

	records sync.Pool // of *[]commitlog.Record, of publishers
	health  health    // has a lock of its own
}

// OpenStorage takes the folder for this process.
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
	s := &Storage{cfg: cfg, dir: dir, kept: make(map[string]queue.Offset)}
	s.epoch = s.moment()
	s.log, s.endLog = obs.Sparse(cfg.Log)
	s.records.New = func() any { return new([]commitlog.Record) }
	return s, nil
}

// LockID is commitlog.LockID of the folder that is locked.
func (s *Storage) LockID() string { return commitlog.LockID(s.cfg.Path) }

// moment is the present one.
func (s *Storage) moment() epoch {
	mono, wall := s.cfg.Clocks()
	return epoch{mono: mono, wall: wall}
}

// putRecords gives a slice of records back.
func (s *Storage) putRecords(records *[]commitlog.Record) {
	clear(*records)
	*records = (*records)[:0]
	s.records.Put(records)
}

// Close gives the folder back. The broker that uses it must be closed.
func (s *Storage) Close() error {
	s.endLog()
	return s.dir.Close()
}

// topicLog is a log with what a topic asks of it beside what cursors need. They mean what
// they do of commitlog.Files.
type topicLog interface {
	commitlog.Log
	At(mono.Wall) (commitlog.Offset, error)
	Need(from commitlog.Offset) commitlog.Offset
	Records(from commitlog.Offset) int64
	Needed() int64
	Size() int64
	SetRetain(commitlog.Retain)
	Stats() commitlog.Stats
	Rest() error
	Remove() error
	Close() error
}

// openLog is one that is open.
type openLog struct{ topicLog }

func (s *Storage) open(topic string) (*openLog, error) {
	if s.cfg.Replicated != nil {
		l, err := s.cfg.Replicated.Open(topic, 0)
		if err != nil {
			return nil, err
		}
		return &openLog{l}, nil
	}
	c := s.logConfig()
	c.Dir, c.Name = s.dir, topic
	l, err := commitlog.Open(c)
	if err != nil {
		return nil, err
	}
	return &openLog{l}, nil
}

// closes is closed when the next log is closed or removed.
func (s *Storage) closes() <-chan struct{} {
	if s.cfg.Replicated != nil {
		return s.cfg.Replicated.Closes()
	}
	return s.dir.Closes()
}

// logs are those that an earlier process has left; it cannot be known yet what is in those away.
func (s *Storage) logs() (names, away []string, err error) {
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

// errFiles: they would be in files, which a broker that replicates does not read.
var errFiles = errors.New("they are not imported while topics are replicated; have them delivered with another --durability first, or move them away")

// bringIn makes logs of what an earlier release or NSQ's nsqd has left.
func (s *Storage) bringIn() error {
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
		s.cfg.Log.Info("messages of an earlier release or of NSQ's nsqd were brought in", "topics", n, obs.KeyCount, report.Messages, "unreadable", report.Unreadable)
	}
	return err
}

// Unreadable returns how many messages on the disk cannot be read, at least, and are kept in
// damaged files, also by earlier processes.
func (b *Broker) Unreadable() (n int64) {
	for _, st := range b.stores() {
		if log := st.log.Load(); log != nil {
			n += int64(log.Stats().Unreadable)
		}
	}
	return n
}
