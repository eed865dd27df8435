package broker

import (
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/tokenbucket"
)

// HexOf is hexOf.
var HexOf = hexOf

// Held returns a message that the channel has ready.
func (t *Topic) Held(channel string) (held *queue.Message) {
	t.runner.mu.Lock()
	defer t.runner.mu.Unlock()
	ready := func(m *queue.Message, _ uint16) { held = m }
	t.runner.mu.core.Channel(channel).Peek(0, 1, ready, ready)
	return held
}

// Spilling returns how many goroutines the topic runs for its disk.
func (t *Topic) Spilling() (n int) {
	t.runner.mu.Lock()
	defer t.runner.mu.Unlock()
	if t.store != nil && t.runner.disk.running {
		n++
	}
	return n
}

// Tick does the work that is due at the broker's time, as the topic's alarms do.
func (t *Topic) Tick() { t.runner.tick(t.runner.shared.now()) }

// TrimOld does the broker's trim of every minute.
func (t *Topic) TrimOld() { t.store.trimOld() }

// FailTrims makes trims of the topic's log fail with err and delete nothing.
func (t *Topic) FailTrims(err error) {
	log := *t.store.log.Load()
	log.Log = untrimmed{log.Log, err}
	t.store.log.Store(&log)
}

type untrimmed struct {
	commitlog.Log
	err error
}

func (u untrimmed) Trim(commitlog.Offset) error { return u.err }

// FailSaves makes the next n saves of the topic's cursors fail with err.
func (t *Topic) FailSaves(n int, err error) {
	log := *t.store.log.Load()
	log.Log = &unsaved{log.Log, err, n}
	t.store.log.Store(&log)
}

type unsaved struct {
	commitlog.Log
	err error
	n   int
}

func (u *unsaved) SaveCursors(snapshot []byte) error {
	if u.n--; u.n >= 0 {
		return u.err
	}
	return u.Log.SaveCursors(snapshot)
}

// Reuse puts n messages into the pool whose offsets are of other places in a log.
func (b *Broker) Reuse(n int) {
	var all []*queue.Message
	for i := range n {
		m := b.shared.pool.get(1)
		m.Offset = queue.Offset(1_000_000 * (i + 1))
		all = append(all, m)
	}
	for _, m := range all {
		b.shared.pool.put(m)
	}
}

// At is the position behind n messages.
func At(n int) Stored { return Stored{commitlog.Offset(n)} }

// LeastBacklog returns the smallest number of messages that waited for tokens ahead of a publisher's message in the
// pacer's interval, or math.MaxInt if no message was sent.
func (t *Topic) LeastBacklog() int {
	t.runner.mu.Lock()
	defer t.runner.mu.Unlock()
	return t.intake.pacing.running.least
}

// Finish is FinishBatch of one message.
func (s *Subscription) Finish(id wire.MessageID) error {
	ids, errs := [1]wire.MessageID{id}, [1]error{}
	return s.FinishBatch(s.topic.runner.shared.now(), ids[:], errs[:0])[0]
}

// SetShare is terms.SetLeased with a share that never ends.
func (t *Topic) SetShare(share tokenbucket.Share, granted tokenbucket.Tokens) tokenbucket.Tokens {
	return t.terms.SetLeased(share, queue.Forever(share), granted)
}

// Renew is terms.Renew.
func (t *Topic) Renew(flexUntil, until mono.Time) bool { return t.terms.Renew(flexUntil, until) }

// Capture, EndCapture and Arrivals are the recorder's.
func (t *Topic) Capture(at mono.Time, wall mono.Wall) { t.intake.recorder.Capture(at, wall) }

func (t *Topic) EndCapture() { t.intake.recorder.EndCapture() }

func (t *Topic) Arrivals() *srtmv1.Arrivals { return t.intake.recorder.Arrivals() }
