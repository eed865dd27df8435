package broker

import (
	"errors"
	"fmt"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/nsqd/replicated"
)

// Restore brings back the topics and messages that an earlier process left in
// the storage. It is called once, before the broker is used.
func (b *Broker) Restore() error {
	st := b.cfg.Storage
	if st == nil {
		return nil
	}
	if err := st.bringIn(); err != nil {
		return err
	}
	if err := b.restoreMetadata(); err != nil {
		return err
	}
	names, err := st.logs()
	if err != nil {
		return fmt.Errorf("restore: %w", err)
	}
	for _, name := range names {
		if !wire.ValidTopicName(name) {
			st.cfg.Log.Warn("storage has a log that is no topic's; it is left alone", "log", name)
			continue
		}
		if err := b.restoreLog(name); err != nil {
			return fmt.Errorf("restore topic %s: %w", name, err)
		}
	}
	if err := b.yieldTaken(); err != nil {
		return fmt.Errorf("restore: %w", err)
	}
	b.metadataWriter.begin()
	b.workers.Go(b.trimOld)
	return nil
}

// restoreLog brings back a topic's messages. A topic that is not recorded is made with
// the channels that it had, if there is anything of it.
func (b *Broker) restoreLog(name string) error {
	_, err := b.Topic([]byte(name))
	recorded := err == nil
	if !recorded {
		log, err := b.cfg.Storage.open(name)
		if err != nil {
			return err
		}
		if stats := log.Stats(); stats.Records == 0 { // but for files with damage
			b.cfg.Storage.kept[name] = queue.Offset(stats.Next)
			return log.Close()
		}
		if err := log.Close(); err != nil {
			return err
		}
	}
	t := b.restoreTopic(name)
	return t.store.restore(func(channel string) bool { return !recorded && wire.ValidChannelName(channel) })
}

// restoreTopic is CreateTopic without asking other brokers for the topic's channels.
// Where a loaddistributor gives the contracts, the topic waits for its share:
// what it held before may be in use elsewhere by now.
func (b *Broker) restoreTopic(name string) *Topic {
	b.mu.Lock()
	defer b.mu.Unlock()
	t := b.mu.topics[name]
	if t == nil {
		t = b.newTopic(name)
		if !b.cfg.AutoCreate {
			t.Limit(SLO{}, false)
		}
		b.mu.topics[name] = t
	}
	return t
}

// restore brings back what an earlier process left in the log.
func (st *store) restore(wanted func(channel string) bool) error {
	log, err := st.storage().open(st.name)
	if err != nil {
		return err
	}
	snapshot, err := log.LoadCursors()
	if err != nil {
		return errors.Join(err, log.Close())
	}
	s := st.begin()
	defer st.end(s)
	now, core := st.shared.now(), st.mu.core
	restoring, err := core.Restore(now, snapshot, queue.Offset(log.Stats().First), st.storage().epoch.monoOf, wanted, &s.fx)
	if err != nil {
		st.report("the record of what is done with is not readable: all that is on disk is delivered again", err)
	}
	next, err := commitlog.Offset(0), found(restoring, log)
	if err == nil {
		next, err = log.Append(nil)
	}
	if err != nil {
		return errors.Join(err, log.Close())
	}
	restoring.Done(now, queue.Offset(next), &s.fx)
	log.SetRetain(st.retention())
	st.retained(log) // before Low, which forgets what no seek can want
	// The log does not know yet what is done with: all of it would count as needed.
	if err := log.Trim(commitlog.Offset(core.Low())); err != nil {
		st.report("log on disk not trimmed; trying again", err)
	}
	st.log.Store(log)
	st.disk.used, st.disk.saved = true, core.Changes()
	return nil
}

// found tells the machine what its log has.
func found(restoring *queue.Restoring, log commitlog.Log) error {
	return each(log, commitlog.Offset(restoring.From), func(batch *commitlog.Batch) error {
		for i := range batch.Records {
			restoring.Found(queue.Offset(batch.Records[i].Offset), string(batch.Records[i].Channel))
		}
		return nil
	})
}

// each reads a log from an offset to its end.
func each(log commitlog.Log, from commitlog.Offset, do func(*commitlog.Batch) error) error {
	var batch commitlog.Batch
	for at := from; ; at = batch.Next {
		if err := log.Read(at, commitlog.Limit{Records: 1000, Bytes: DefaultReadAhead}, &batch); err != nil {
			return err
		}
		if batch.Next == at {
			return nil
		}
		if err := do(&batch); err != nil {
			return err
		}
	}
}

// lastSaves is how often the last snapshot of the cursors is tried while their stream has no
// leader, for half a second each: it has one again a second or two after a server of NATS
// is lost. Without it what is finished would come again.
const lastSaves = 10

// makeRoom deletes what is needed no more on disk: what is left to the next process
// may need the place.
// Requires: the topic is closed, and run has ended.
func (st *store) makeRoom() error {
	st.scratch = new(scratch)
	return st.tryToSave()
}

// persist leaves to the next process what is in memory, and where the cursors are.
// Requires: the topic is closed, and run has ended.
func (st *store) persist() error {
	st.scratch = new(scratch)
	st.do(func(_ mono.Time, s *step) { st.mu.core.Leave(&s.fx) })
	held, _ := st.held(0)
	if log := st.log.Load(); held == 0 {
		if log == nil {
			return nil
		}
		if log.Stats().Unreadable == 0 && !st.retains() && st.storage().cfg.Replicated == nil {
			return log.Remove()
		}
	}
	for more := true; more; {
		var err error
		if more, err = st.write(); err != nil {
			return st.lost(err)
		}
	}
	log, err := st.ensure()
	if err != nil {
		return err
	}
	st.mu.Lock()
	st.disk.used, st.disk.saved = true, st.mu.core.Changes()-1
	st.mu.Unlock()
	err = st.tryToSave()
	for tries := 1; errors.Is(err, replicated.ErrUnavailable) && tries < lastSaves; tries++ {
		err = st.tryToSave()
	}
	if errors.Is(err, errUntrimmed) { // the next process does
		st.storage().cfg.Log.Warn("old messages are not deleted", obs.KeyTopic, st.name, obs.KeyError, err)
		err = nil
	}
	return errors.Join(err, log.Close())
}

// lost says that messages cannot be stored, and how many of them are nowhere else.
func (st *store) lost(err error) error {
	st.mu.Lock()
	n := st.mu.core.Unstored()
	st.mu.Unlock()
	err = fmt.Errorf("%d messages of %s are lost: %w", n, st.name, err)
	if log := st.log.Load(); log != nil {
		err = errors.Join(err, st.tryToSave(), log.Close())
	}
	return err
}
