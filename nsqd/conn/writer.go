package conn

import (
	"time"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/nsqd/broker"
)

// writer sends messages to a subscriber. It flushes as soon as no more messages are ready. With
// strict buffering it flushes only when the client's buffer is full or its timeout has passed.
type writer struct {
	// Set once.
	g     *goroutine
	eager bool          // flush when no more messages are ready
	size  int           // flush at this size in bytes
	delay time.Duration // unless eager: flush this long after the first message; 0: no timeout

	// Owned by run.
	out broker.Outgoing // collected, not written yet
}

const (
	// gatherSize is the maximum size of one write in bytes, unless a message is larger.
	gatherSize = 16 << 10
	// keepOut is the largest buffer that an idle subscriber keeps, in bytes.
	keepOut = 4 * gatherSize
)

func (g *goroutine) newWriter() *writer {
	out := broker.Outgoing{Encoder: g.client.encoder}
	if !g.client.env.cfg.StrictBuffering || g.client.mqtt != nil {
		return &writer{g: g, eager: true, size: gatherSize, out: out}
	}
	id := g.client.peer.Identity()
	return &writer{g: g, size: max(id.OutputBufferSize, 1), delay: id.OutputBufferTimeout, out: out}
}

// run ends with the subscription or after a failed write. In both cases it makes the reader end,
// which cleans up and closes.
func (w *writer) run() {
	flush := time.NewTimer(time.Hour)
	defer flush.Stop()
	flush.Stop()
	for {
		select {
		case <-w.g.wake:
			waiting := w.out.Messages() > 0
			open, err := w.gather()
			if !open || err != nil {
				w.fail(err)
				return
			}
			if w.out.Messages() > 0 && !waiting && w.delay > 0 {
				flush.Reset(w.delay)
			}
		case <-flush.C:
			if err := w.flush(); err != nil {
				w.fail(err)
				return
			}
		}
	}
}

// gather encodes messages until no more are ready.
func (w *writer) gather() (open bool, err error) {
	for {
		count := w.out.Messages()
		if open = w.g.client.deliveries.Take(&w.out, w.size); !open || w.out.Messages() == count {
			break
		}
		// A subscriber with a full RDY count gets no more messages until it answers, so a longer
		// wait is useless.
		ready, inFlight := w.g.client.deliveries.Holds()
		if len(w.out.Frames) >= w.size || w.eager || inFlight >= ready {
			if err := w.flush(); err != nil {
				return open, err
			}
		}
	}
	return open, nil
}

func (w *writer) flush() error {
	if w.out.Messages() == 0 {
		return nil
	}
	if err := w.g.write(w.out.Frames); err != nil {
		return err
	}
	w.g.client.deliveries.Wrote(&w.out)
	add(&w.g.client.stats.messages, w.out.Messages())
	w.out.Reset()
	if cap(w.out.Frames) > keepOut {
		w.out.Frames = nil
	}
	return nil
}

// fail ends the connection. After a write error it closes the socket at once, which also frees a
// reader that is stuck in a reply.
func (w *writer) fail(err error) {
	if err == nil {
		w.g.client.quit()
		return
	}
	if ignoreClosed(err) != nil {
		w.g.client.env.log.Debug("subscriber lost", obs.KeyRemote, w.g.client.remote, obs.KeyError, err)
	}
	w.g.nc.Close()
}
