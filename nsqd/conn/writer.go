package conn

import (
	"time"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/nsqd/broker"
)

// writer sends a subscriber its messages. It flushes as soon as nothing more
// is ready; with strict buffering only when the client's buffer is full or its
// timeout has passed.
type writer struct {
	// Set once.
	g     *goroutine
	eager bool          // flush when nothing more is ready
	size  int           // flush when so much is gathered
	delay time.Duration // unless eager: flush so long after the first; 0: never for that

	// Owned by run.
	out broker.Outgoing // gathered, not written yet
}

const (
	// gatherSize is how many bytes one write gathers at the most, unless a
	// single message is larger.
	gatherSize = 16 << 10
	// keepOut is the largest buffer an idle subscriber keeps.
	keepOut = 4 * gatherSize
)

func (g *goroutine) newWriter() *writer {
	if !g.env.cfg.StrictBuffering {
		return &writer{g: g, eager: true, size: gatherSize}
	}
	id := g.sess.Identity()
	return &writer{g: g, size: max(id.OutputBufferSize, 1), delay: id.OutputBufferTimeout}
}

// run ends with the subscription or at a failed write; either way it has the
// reader end, which cleans up and closes.
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
				w.lost(err)
				return
			}
			if w.out.Messages() > 0 && !waiting && w.delay > 0 {
				flush.Reset(w.delay)
			}
		case <-flush.C:
			if err := w.flush(); err != nil {
				w.lost(err)
				return
			}
		}
	}
}

// gather encodes what is ready, until nothing more is.
func (w *writer) gather() (open bool, err error) {
	for {
		before := w.out.Messages()
		if open = w.g.sub.Take(&w.out, w.size); !open || w.out.Messages() == before {
			break
		}
		// A subscriber that may get no more until it answers would wait for
		// the timeout in vain.
		ready, inFlight := w.g.sub.Holds()
		if len(w.out.Frames) >= w.size || w.eager || inFlight >= ready {
			if err := w.flush(); err != nil {
				return open, err
			}
		}
	}
	return open, nil
}

// flush writes what was gathered.
func (w *writer) flush() error {
	if w.out.Messages() == 0 {
		return nil
	}
	if err := w.g.write(w.out.Frames); err != nil {
		return err
	}
	w.g.sub.Wrote(&w.out)
	add(&w.g.stats.messages, w.out.Messages())
	w.out.Reset()
	if cap(w.out.Frames) > keepOut {
		w.out.Frames = nil
	}
	return nil
}

// lost ends the connection: at once if the peer cannot be written to, which
// also frees a reader that is stuck in a reply.
func (w *writer) lost(err error) {
	if err == nil {
		w.g.quit()
		return
	}
	if ignoreClosed(err) != nil {
		w.g.env.log.Debug("subscriber lost", obs.KeyRemote, w.g.remote, obs.KeyError, err)
	}
	w.g.nc.Close()
}
