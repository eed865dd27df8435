package broker

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/metadata"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/nsqd/replicated"
)

// Restore restores the topics and messages that an earlier process left in the storage.
// Called once, before the broker is used.
func (b *Broker) Restore() error {
	st := b.shared.cfg.Storage
	if st == nil {
		return nil
	}
	if err := st.importMessages(); err != nil {
		return err
	}
	if err := b.restoreMetadata(); err != nil {
		return err
	}
	names, unavailable, err := st.logs()
	if err != nil {
		return fmt.Errorf("restore: %w", err)
	}
	for _, name := range names {
		if !wire.ValidTopicName(name) {
			st.cfg.Log.Warn("ignoring a log whose name is not a valid topic name", "log", name)
			continue
		}
		switch err := b.restoreLog(name); {
		case err != nil && st.cfg.Replicated != nil:
			unavailable = append(unavailable, name)
		case err != nil:
			return fmt.Errorf("restore topic %s: %w", name, err)
		}
	}
	for _, name := range unavailable {
		b.addUnavailable(name)
	}
	b.reportLostLogs()
	if err := b.yieldTaken(); err != nil {
		return fmt.Errorf("restore: %w", err)
	}
	_ = metadata.Reserve(st.cfg.Metadata) // without room, a later order fails
	b.shared.metadataWriter.begin()
	b.shared.workers.Go(b.trimOld)
	b.shared.workers.Go(b.restoreUnavailable)
	return nil
}

// reportLostLogs reports each topic whose log is missing, although the metadata file says
// that it had a log. The topic continues with an empty log.
func (b *Broker) reportLostLogs() {
	if b.shared.cfg.Storage.cfg.Replicated != nil {
		return // the marks concern logs in files
	}
	for _, st := range b.stores() {
		if st.logged.Load() && st.log.Load() == nil {
			st.reportMissing("the topic's log is missing: its folder was deleted or moved away while nsqd was down. All messages in it are lost; the topic continues with an empty log")
			st.logged.Store(false)
			b.shared.recorded(st.runner.name)
		}
	}
}

// reportMissing counts and logs a missing part of the topic's log.
func (st *store) reportMissing(what string, attrs ...any) {
	st.missing++
	st.storage().cfg.Log.Error(what, append([]any{obs.KeyTopic, st.runner.name, keyPath, st.storage().dir.Path(st.runner.name)}, attrs...)...)
}

// restoreLog restores a topic's messages. An unrecorded topic with messages is created with
// the channels of its log.
func (b *Broker) restoreLog(name string) error {
	_, err := b.Topic([]byte(name))
	recorded := err == nil
	if !recorded {
		log, err := b.shared.cfg.Storage.open(name)
		if err != nil {
			return err
		}
		if stats := log.Stats(); stats.Records == 0 { // empty, except for damaged files
			b.shared.cfg.Storage.nextOffsets[name] = queue.Offset(stats.Next)
			return log.Close()
		}
		if err := log.Close(); err != nil {
			return err
		}
	}
	t := b.restoreTopic(name)
	t.store.unrecorded = !recorded // no other goroutine uses the topic yet
	if !recorded && b.shared.cfg.Storage.cfg.Replicated == nil {
		b.shared.cfg.Storage.cfg.Log.Error("the metadata file does not have the topic: it was deleted, or is from before the topic was created. The topic comes back with the messages and channels of its log, without pauses, contract, retention and expiry",
			obs.KeyTopic, name, keyPath, b.shared.cfg.Storage.cfg.Metadata, "log", b.shared.cfg.Storage.dir.Path(name))
	}
	return t.store.restore()
}

// restoreTopic is CreateTopic without a request for the topic's channels to other brokers. If a
// loaddistributor grants contracts, the topic waits for its share: another broker may use
// the former share.
func (b *Broker) restoreTopic(name string) *Topic {
	b.mu.Lock()
	defer b.mu.Unlock()
	t := b.mu.topics[name]
	if t == nil {
		t = b.newTopic(name)
		if !b.shared.cfg.AutoCreate {
			t.terms.Limit(SLO{}, false)
		}
		b.mu.topics[name] = t
	}
	return t
}

// restore restores the log that an earlier process left. The topic may already be in use if
// its stream was unavailable, so the log is read before the machine is changed.
func (st *store) restore() error {
	log, err := st.storage().open(st.runner.name)
	if err != nil {
		return err
	}
	if err := st.restoreFrom(log); err != nil {
		return errors.Join(err, log.Close())
	}
	if !st.logged.Load() {
		if err := st.mark(log); err != nil { // retried before the next message
			st.report("the metadata file does not record the topic's log; a deletion of the log would go unnoticed", err)
		}
	}
	st.saving.Lock()
	defer st.saving.Unlock()
	st.runner.mu.Lock()
	low := st.runner.mu.core.Cursors().Low()
	st.runner.mu.Unlock()
	// The log does not know the finished messages yet, and would count all messages as
	// needed.
	if err := log.Trim(commitlog.Offset(low)); err != nil {
		st.report("cannot delete old messages from the log; retrying", err)
	}
	return nil
}

func (st *store) restoreFrom(log *openLog) error {
	left, err := st.readContents(log, log.Stats().First)
	if err != nil {
		return err
	}
	next, err := log.Append(nil)
	if err != nil {
		return err
	}
	s := st.runner.begin()
	defer st.runner.end(s)
	if st.runner.mu.closed {
		return ErrGone
	}
	now, core := st.runner.shared.now(), st.runner.mu.core
	wanted := func(channel string) bool { return st.unrecorded && wire.ValidChannelName(channel) }
	restoring, _ := left.restore(core, now, st.storage().current(), wanted, &s.fx)
	if st.unrecorded && st.restoreRoster != nil {
		st.restoreRoster(left.roster)
		s.record = true
	}
	if n := left.first - restoring.Needed; n > 0 {
		st.reportMissing("unfinished messages are missing: their files were deleted, or the record of finished messages was lost",
			"from", uint64(restoring.Needed), "to", uint64(left.first), "at_most", uint64(n))
	}
	restoring.Done(now, queue.Offset(next), &s.fx)
	log.SetRetain(st.retention())
	st.retained(log) // before Low, which discards what no seek needs
	st.log.Store(log)
	st.runner.disk.used, st.runner.disk.saved = true, core.Log().Changes()
	st.runner.disk.unavailable, st.unrecorded = false, false
	if st.logged.Load() && left.snapshot == nil && st.storage().cfg.Replicated == nil {
		st.reportNoCursors(log.Stats().Segments > 0)
		st.logged.Store(false) // until there is a snapshot again
	}
	return nil
}

// reportNoCursors reports that the record of finished messages, which the log had when it
// was marked, is missing or damaged.
func (st *store) reportNoCursors(messages bool) {
	if messages {
		st.reportMissing("the topic's cursor files are missing or damaged: all messages that the log has are delivered again to every channel; messages before them, if there were any, are lost")
	} else {
		st.reportMissing("the topic's log is empty: all its files were deleted while nsqd was down. All messages in it are lost; the topic continues with an empty log")
	}
}

// contents describes what a log has.
type contents struct {
	roster   roster // of a replicated log
	snapshot []byte
	first    queue.Offset // offset of the log's first message
	runs     []run        // messages that the snapshot does not cover
}

// run is a range of consecutive offsets with messages, for all channels or for one channel
// only.
type run struct {
	from, to queue.Offset
	only     string
}

// readContents reads the contents of a log that begins at first.
func (st *store) readContents(log commitlog.Log, first commitlog.Offset) (left contents, err error) {
	if left.snapshot, err = log.LoadCursors(); err != nil {
		return left, err
	}
	if st.roster != nil && len(left.snapshot) > 0 {
		if left.roster, left.snapshot, err = parseRoster(left.snapshot); err != nil {
			st.report("cannot read the record of finished messages: all messages in the log are delivered again", err)
		}
	}
	left.first = queue.Offset(first)
	var fx queue.Effects
	restoring, err := left.restore(newMachine(), st.runner.shared.now(), st.storage().current(), wire.ValidChannelName, &fx)
	if err != nil {
		st.report("cannot read the record of finished messages: all messages in the log are delivered again", err)
	}
	return left, each(log, commitlog.Offset(restoring.From), func(batch *commitlog.Batch) error {
		for i := range batch.Records {
			r := &batch.Records[i]
			offset, n := queue.Offset(r.Offset), len(left.runs)
			if n > 0 && left.runs[n-1].to == offset && left.runs[n-1].only == string(r.Channel) {
				left.runs[n-1].to++
			} else {
				left.runs = append(left.runs, run{offset, offset + 1, string(r.Channel)})
			}
		}
		return nil
	})
}

// newMachine returns a machine that belongs to no topic, to examine a log.
func newMachine() *queue.Topic {
	return queue.NewTopic(queue.Config{Capacity: 1, Overflow: 1, WriteThrough: true, Rand: rand.New(rand.NewPCG(0, 0))})
}

// restore restores the log's contents in a machine. Errors: as queue.Topic.Restore.
func (l *contents) restore(core *queue.Topic, now mono.Time, e *epoch, wanted func(channel string) bool, fx *queue.Effects) (*queue.Restoring, error) {
	restoring, err := core.Disk().Restore(now, l.snapshot, l.first, e.monoOf, wanted, fx)
	for _, r := range l.runs {
		for offset := r.from; offset < r.to; offset++ {
			restoring.Found(offset, r.only)
		}
	}
	return restoring, err
}

// each reads a log from an offset to the end.
func each(log commitlog.Log, from commitlog.Offset, do func(*commitlog.Batch) error) error {
	var batch commitlog.Batch
	for offset := from; ; offset = batch.Next {
		if err := log.Read(offset, commitlog.Limit{Records: 1000, Bytes: DefaultReadAhead}, &batch); err != nil {
			return err
		}
		if batch.Next == offset {
			return nil
		}
		if err := do(&batch); err != nil {
			return err
		}
	}
}

// lastSaves bounds the attempts to save the last snapshot of the cursors while the stream
// has no leader. Each attempt takes half a second. After the loss of a NATS server the
// stream has a new leader within a second or two. Without the snapshot, finished messages
// would come again.
const lastSaves = 10

// makeRoom deletes obsolete data on disk, since the messages for the next process may need
// the room.
// Requires: the topic is closed, and run has ended.
func (st *store) makeRoom() error {
	st.scratch = new(scratch)
	return st.tryToSave()
}

// prepareExit determines what the next process needs. A log that the next process does not need
// loses its mark, so that the metadata file can be written before the log is removed.
// Requires: the topic is closed, and run has ended.
func (st *store) prepareExit() error {
	st.runner.do(func(_ mono.Time, s *step) { st.runner.mu.core.Cursors().StoreLast(&s.fx) })
	held, _ := st.runner.held(0)
	log, retains := st.log.Load(), st.retains()
	st.runner.mu.Lock()
	st.empty = held == 0 && !(retains && st.runner.mu.core.Log().Unwritten())
	st.runner.mu.Unlock()
	st.obsolete = st.empty && log != nil && log.Stats().Damaged == 0 && !retains && st.storage().cfg.Replicated == nil
	if st.obsolete {
		st.logged.Store(false)
	}
	return nil
}

// persist stores the messages in memory and the cursors for the next process.
// Requires: leave was called, and the marks have been recorded since.
func (st *store) persist() error {
	st.scratch = new(scratch)
	log := st.log.Load()
	switch {
	case st.obsolete:
		return log.Remove()
	case st.empty && log == nil:
		return nil
	}
	for more := true; more; {
		var err error
		if more, err = st.write(); err != nil {
			return st.reportLost(err)
		}
	}
	log, err := st.ensure()
	if err != nil {
		return err
	}
	st.runner.mu.Lock()
	st.runner.disk.used, st.runner.disk.saved = true, st.runner.mu.core.Log().Changes()-1
	st.runner.mu.Unlock()
	err = st.tryToSave()
	for tries := 1; errors.Is(err, replicated.ErrUnavailable) && tries < lastSaves; tries++ {
		err = st.tryToSave()
	}
	if errors.Is(err, replicated.ErrFenced) { // another broker has the messages and saves cursors
		st.storage().cfg.Log.Warn("another broker has taken the topic over; it delivers again the messages that channels finished since the last save", obs.KeyTopic, st.runner.name)
		err = nil
	}
	if errors.Is(err, errUntrimmed) { // the next process trims
		st.storage().cfg.Log.Warn("cannot delete finished messages; the next start deletes them", obs.KeyTopic, st.runner.name, obs.KeyError, err)
		err = nil
	}
	if err != nil {
		err = fmt.Errorf("topic %s: cannot save the record of finished messages; messages finished since the last save are delivered again: %w", st.runner.name, err)
	}
	return errors.Join(err, log.Close())
}

// reportLost reports that messages cannot be stored, and how many are lost.
func (st *store) reportLost(err error) error {
	st.runner.mu.Lock()
	n := st.runner.mu.core.Cursors().Unstored()
	st.runner.mu.Unlock()
	err = fmt.Errorf("topic %s has lost %s: %w", st.runner.name, plural.Count(n, "message"), err)
	if log := st.log.Load(); log != nil {
		err = errors.Join(err, st.tryToSave(), log.Close())
	}
	return err
}

// record encodes a message for the log. Requires: the topic's mu held.
func (e *epoch) record(m *queue.Message, released bool) commitlog.Record {
	arrival := e.wallOf(m.Arrival)
	r := commitlog.Record{
		Offset: commitlog.Offset(m.Offset), ID: m.ID, Timestamp: m.Timestamp, Arrival: arrival, Source: m.Source,
		Attempts: m.Attempts, Body: m.Body, Attribute: m.Attribute(),
	}
	if m.Defer > 0 {
		r.Due = arrival + mono.Wall(m.Defer)
	}
	if released {
		r.Access = m.Access + 1
	}
	if m.Only != nil {
		r.Channel = []byte(*m.Only)
	}
	return r
}

// restored decodes a message of an epoch from the log and copies the content. The arrival is
// now at the latest: if the wall clock was set back since the write, the message would seem to come
// from the future, and would wait.
func (b *shared) restored(e *epoch, r *commitlog.Record) *queue.Message {
	now := b.now()
	m := b.pool.get(len(r.Body) + len(r.Attribute))
	m.SetContent(r.Body, r.Attribute)
	m.ID, m.Timestamp = r.ID, r.Timestamp
	m.Arrival, m.Source = e.monoOf(r.Arrival), r.Source
	m.Defer = 0
	if r.Due > 0 {
		m.Defer = max(0, time.Duration(r.Due-r.Arrival))
	}
	if early := m.Arrival.Sub(now); early > 0 {
		m.Arrival = m.Arrival.Add(-early)
	}
	m.Offset, m.Only, m.Attempts = queue.Offset(r.Offset), nil, r.Attempts
	if len(r.Channel) > 0 {
		only := string(r.Channel)
		m.Only = &only
	}
	m.Access, m.Held = max(0, r.Access-1), 0
	m.Released = m.Arrival.Add(m.Access)
	return m
}

// epoch is one moment on both clocks, with no step of the wall clock since. A record is
// written and read by the same epoch, so steps of the wall clock do not affect the records
// of this process. Another process uses the wall clock of its time. So a step begins a new
// epoch: otherwise messages from after the step would have the wrong age after a restart.
// When cursors are saved, the epoch is the moment of saving, because only another process
// reads the cursors.
type epoch struct {
	mono mono.Time
	wall mono.Wall
}

func (e *epoch) wallOf(m mono.Time) mono.Wall { return e.wall + mono.Wall(m-e.mono) }
func (e *epoch) monoOf(w mono.Wall) mono.Time { return e.mono + mono.Time(w-e.wall) }

// epochs are the epochs of the records that this process has appended to a log, in order.
type epochs struct {
	changes atomic.Pointer[[]epochChange]
}

type epochChange struct {
	from  commitlog.Offset
	epoch *epoch
}

// maxEpochs bounds the epochs of a log. The oldest epoch is forgotten: its records count as
// records of an earlier process.
const maxEpochs = 64

// append appends records of an epoch to the log. Requires: one call at a time.
func (es *epochs) append(log *openLog, e *epoch, records []commitlog.Record) (first commitlog.Offset, err error) {
	if first, err = log.Append(records); err == nil {
		es.add(first, e) // before a reader knows of the records
	}
	return first, err
}

// add notes the epoch of the records from first on.
func (es *epochs) add(first commitlog.Offset, e *epoch) {
	var all []epochChange
	if changes := es.changes.Load(); changes != nil {
		all = *changes
	}
	if n := len(all); n > 0 && all[n-1].epoch == e {
		return
	}
	next := append(slices.Clone(all[max(0, len(all)+1-maxEpochs):]), epochChange{first, e})
	es.changes.Store(&next) // not all itself: each call would allocate all
}

// at returns the epoch of a record, or earlier for a record of an earlier process.
func (es *epochs) at(offset commitlog.Offset, earlier *epoch) *epoch {
	if changes := es.changes.Load(); changes != nil {
		for _, c := range slices.Backward(*changes) {
			if offset >= c.from {
				return c.epoch
			}
		}
	}
	return earlier
}

// After a start of the broker, a topic is unavailable until its stream answers. Until then the
// topic exists with its recorded properties, and accepts no messages.

// unavailableRetry is the interval at which unavailable streams are tried.
const unavailableRetry = time.Second

// addUnavailable creates a topic whose stream is unavailable. Requires: the broker is not in use yet.
func (b *Broker) addUnavailable(name string) {
	_, err := b.Topic([]byte(name))
	t := b.restoreTopic(name)
	t.runner.mu.Lock()
	t.store.unrecorded = t.store.unrecorded || err != nil
	t.runner.disk.unavailable = true
	t.runner.mu.Unlock()
	t.store.recordResult(restoring, ErrUnavailable)
	b.shared.cfg.Storage.cfg.Log.Error("JetStream stream unavailable; the topic refuses publishes until the stream is back", obs.KeyTopic, name)
}

// restoreUnavailable restores the unavailable topics, until all are restored or the broker is
// closed.
func (b *Broker) restoreUnavailable() {
	tick := time.NewTicker(unavailableRetry)
	defer tick.Stop()
	for {
		unavailable := slices.DeleteFunc(b.stores(), func(st *store) bool { return !st.runner.isUnavailable() })
		if len(unavailable) == 0 {
			return
		}
		select {
		case <-b.closing:
			return
		case <-tick.C:
		}
		_ = inParallel(unavailable, b.restoreIfBack) // health has the reasons
	}
}

func (b *Broker) restoreIfBack(st *store) error {
	has, err := b.shared.cfg.Storage.cfg.Replicated.Has(st.runner.name)
	switch {
	case err == nil && has:
		err = st.restore()
	case err == nil:
		b.beginEmpty(st)
	}
	st.recordResult(restoring, err)
	if err == nil {
		b.shared.changed(st.runner.name)
		b.shared.cfg.Storage.cfg.Log.Info("JetStream stream available again; the topic accepts publishes", obs.KeyTopic, st.runner.name)
	}
	return err
}

// beginEmpty makes a topic available whose replicated log is gone (see yieldTaken). In a
// cluster, beginEmpty deletes the topic.
func (b *Broker) beginEmpty(st *store) {
	t, err := b.Topic([]byte(st.runner.name))
	if err != nil {
		return
	}
	if !b.shared.cfg.AutoCreate && b.forget(t, t.runner.unavailableLocked) {
		t.close(true)
		return
	}
	t.runner.mu.Lock()
	t.runner.disk.unavailable = false
	t.runner.mu.Unlock()
}
