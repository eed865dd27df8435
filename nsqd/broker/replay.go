package broker

import (
	"encoding/binary"
	"time"

	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsqd/diskqueue"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/nsqd/wire"
)

// replay is up to where channels have had the messages of their topic's line that
// an earlier process had released without recording it: from the line they would
// come a second time. A channel gets the line's messages in the line's order and
// stores them in that order, so the last one it has stored tells; a channel that
// has stored none, or of which that is not known, gets all of them again.
type replay map[*queue.Channel]diskqueue.Position

// replaySpan bounds how far a line is read for the channels' last messages: one
// that is so much younger than all of them is behind them, unless a clock was put.
const replaySpan = time.Minute

// replayed finds it out. Requires: mu held; nothing was read from disk, the
// topic's own line's, and its channels are restored.
func (t *Topic) replayed(disk *diskqueue.Queue) (replay, error) {
	last := make(map[wire.MessageID][]*queue.Channel)
	youngest := stamp.Wall(0)
	for _, c := range t.mu.core.Channels() {
		sp := t.mu.spillers[c.Line()]
		if sp == nil || sp.disk.Load() == nil {
			continue
		}
		record, err := sp.disk.Load().Last()
		if err != nil {
			return nil, err
		}
		if len(record) < recordHeader {
			continue
		}
		id, at := recordID(record)
		last[id] = append(last[id], c)
		youngest = max(youngest, at)
	}
	if len(last) == 0 {
		return nil, nil
	}
	defer disk.Rewind()
	found := make(replay)
	for {
		records, err := disk.Read(1000, refillBytes, nil)
		if err != nil {
			return nil, err
		}
		for _, r := range records {
			if len(r.Data) < recordHeader {
				continue
			}
			id, at := recordID(r.Data)
			for _, c := range last[id] {
				found[c] = r.End
			}
			delete(last, id)
			if at > youngest+stamp.Wall(replaySpan) {
				return found, nil
			}
		}
		if len(records) == 0 || len(last) == 0 {
			return found, nil
		}
	}
}

// recordID returns the id and the timestamp of a message record.
// Requires: it has a header.
func recordID(b []byte) (id wire.MessageID, at stamp.Wall) {
	copy(id[:], b[8:24])
	return id, stamp.Wall(binary.BigEndian.Uint64(b[24:]))
}

// pass tells the channels that they have had those of the messages that were just
// read, which end at ends. Requires: mu held.
func (r replay) pass(core *queue.Topic, kept []queue.Kept, ends []diskqueue.Position) {
	for c, upTo := range r {
		n := 0
		for n < len(ends) && !upTo.Before(ends[n]) {
			n++
		}
		if n > 0 {
			core.Passed(c, kept[n-1].Ticket)
		}
		if n < len(ends) {
			delete(r, c) // what comes now is new to it
		}
	}
}
