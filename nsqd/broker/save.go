package broker

import (
	"errors"

	"github.com/srtm-io/srtm/nsqd/diskqueue"
	"github.com/srtm-io/srtm/nsqd/queue"
)

// saved is what a line with Through has recorded as done with, and, for a
// topic's own line, what it waits for.
type saved struct {
	upTo diskqueue.Position // released and checkpointed
	any  bool

	// A message leaves the topic's disk only when it is durable on the disk of
	// every channel that got it: next may be released when each channel has
	// stored what it had been given when next was noted.
	next    diskqueue.Position
	waiting map[*queue.Line]uint64 // messages that must have arrived; nil: nothing is noted
}

// save records on disk which messages are done with, and lets go of files. It
// reports whether it is to be called again though nothing changes meanwhile.
func (sp *spiller) save() (again bool, err error) {
	sp.topic.mu.Lock()
	sp.unsaved = false
	sp.topic.mu.Unlock()
	if err := sp.saveResume(); err != nil {
		return true, err
	}
	disk := sp.disk.Load()
	if disk == nil {
		return false, nil
	}
	sp.topic.mu.Lock()
	end, any := sp.reading.doneUpTo()
	line := sp.topic.mu.spillers[sp.topic.mu.core.Line()]
	sp.topic.mu.Unlock()
	keep := false
	if sp.line.Through() && line != nil && line != sp {
		// As long as the topic's line could come again, what the channel had of it
		// must be known.
		from := line.disk.Load()
		keep = from != nil && !from.Checkpointed()
		disk.KeepLast(keep)
	}
	if !any || sp.saved.any && sp.saved.upTo == end {
		if sp.rests == 0 {
			return false, nil
		}
		if err := disk.Checkpoint(); err != nil {
			return true, err
		}
		if keep { // until the topic's line tells
			return false, nil
		}
		sp.rests--
		return sp.rests > 0, nil
	}
	if sp.line.Channel() != nil || !sp.line.Through() {
		return true, sp.record(disk, end)
	}
	return true, sp.saveTopic(disk, end)
}

// settled has the topic's channels look whether they still have to keep what they
// had last: the topic's own line, which this is, is recorded anew.
func (sp *spiller) settled() {
	if disk := sp.disk.Load(); disk == nil || !disk.Checkpointed() {
		return
	}
	s := sp.topic.begin()
	for _, other := range sp.topic.mu.spillers {
		if other != sp && other.line.Through() && !other.unsaved {
			other.unsaved = true
			sp.topic.tell(other, s)
		}
	}
	sp.topic.end(s)
}

// saveResume is save for what an earlier process had in memory. Its queue goes
// when all of it is done with.
func (sp *spiller) saveResume() error {
	q := sp.resume.Load()
	if q == nil {
		return nil
	}
	t := sp.topic
	t.mu.Lock()
	end, any := sp.resumed.doneUpTo()
	left := len(sp.resumed.open)
	var disks []*diskqueue.Queue
	if t.Durable() && sp.line.Channel() == nil { // channels have on disk what the topic is done with
		for _, other := range t.mu.spillers {
			if d := other.disk.Load(); d != nil && other != sp {
				disks = append(disks, d)
			}
		}
	}
	t.mu.Unlock()
	if !any || end == sp.past {
		return nil
	}
	if err := syncAll(disks); err != nil {
		return err
	}
	if left == 0 {
		sp.resume.Store(nil)
		return q.Retire()
	}
	q.Release(end)
	if err := q.Checkpoint(); err != nil {
		return err
	}
	sp.past = end
	return nil
}

// syncAll makes durable what is in the queues of channels.
func syncAll(disks []*diskqueue.Queue) error {
	for _, d := range disks {
		// A channel that is deleted just now needs nothing any more.
		if err := d.Sync(); err != nil && !errors.Is(err, diskqueue.ErrClosed) {
			return err
		}
	}
	return nil
}

func (sp *spiller) record(disk *diskqueue.Queue, end diskqueue.Position) error {
	disk.Release(end)
	if err := disk.Checkpoint(); err != nil {
		return err
	}
	sp.saved.upTo, sp.saved.any = end, true
	sp.rests = restAfter
	return nil
}

// saveTopic notes a position in one turn and releases it in a later one.
func (sp *spiller) saveTopic(disk *diskqueue.Queue, end diskqueue.Position) error {
	t := sp.topic
	t.mu.Lock()
	if sp.saved.waiting == nil {
		sp.saved.next = end
		sp.saved.waiting = make(map[*queue.Line]uint64)
		for _, c := range t.mu.core.Channels() {
			if l := c.Line(); l.Through() {
				sp.saved.waiting[l], _ = l.Overflowed()
			}
		}
	}
	arrived := true
	var disks []*diskqueue.Queue
	for _, c := range t.mu.core.Channels() {
		l := c.Line()
		want, noted := sp.saved.waiting[l]
		if !noted {
			continue // younger, or ephemeral
		}
		if _, there := l.Overflowed(); there < want {
			arrived = false
		}
		if other := t.mu.spillers[l]; other != nil {
			if d := other.disk.Load(); d != nil {
				disks = append(disks, d)
			}
		}
	}
	t.mu.Unlock()
	if !arrived {
		return nil
	}
	if !t.broker.cfg.Storage.cfg.Fsync {
		disks = nil // the system has what was written, and that is what was promised
	}
	if err := syncAll(disks); err != nil {
		return err
	}
	sp.saved.waiting = nil
	if err := sp.record(disk, sp.saved.next); err != nil {
		return err
	}
	sp.settled()
	return nil
}
