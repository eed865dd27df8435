package fleet

import (
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/tools/iotpub/payload"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/iotpub/verify"
)

const (
	// maxOut is how much a connection may owe its socket before its publisher
	// has to wait.
	maxOut = 256 << 10
	// maxFrame bounds an answer. A publisher gets OK, heartbeats and errors.
	maxFrame = 64 << 10
	// maxDialling bounds the connections that a worker opens at once.
	maxDialling = 128
	// maxBurst bounds the events sent between two looks at the answers.
	maxBurst = 64
	// helloTimeout bounds dialling and IDENTIFY together.
	helloTimeout = 5 * time.Second
	// firstRetry is the wait before a second dial; it doubles up to lastRetry.
	firstRetry = 20 * time.Millisecond
	lastRetry  = time.Second
	// tick is how often a worker looks after dials even if nothing happens.
	tick = 50 * time.Millisecond
)

// worker owns every n-th publisher.
type worker struct {
	// mu guards what other goroutines want done on the worker's, which does all of
	// it between two bursts: there is as much as they ask for in that time.
	mu struct {
		sync.Mutex
		todo  []func()
		wake  func() // nil until there is a poller
		ended bool
	}

	// set once
	cfg          *Config
	shard        int
	allConnected func()

	// owned by run
	poll       poller
	publishers []publisher
	links      []*link // by slot
	free       []int32 // slots
	freed      []int32 // slots to be free once the present events are handled
	redial     []retry // publishers without a link and without a dial
	dials      int     // links in dialling or identifying
	waiting    int     // publishers with something waiting
	unanswered int     // commands that await an answer
	connected  int     // publishers with a ready link
	gateOpen   bool    // allConnected has been called

	stream    schedule.Stream
	next      schedule.Event
	more      bool // next is valid
	start     mono.Time
	started   bool
	stopped   bool // the schedule is over, or cut short
	drainEnds mono.Time
	aborted   bool
	nextTick  mono.Time

	stats    Stats
	accepted *verify.Set
	captured []mono.Time
	lost     error // why the last connection was lost

	// scratch
	body, cmd []byte
	bodies    [][]byte
	input     []byte
	events    []event
}

type retry struct {
	publisher *publisher
	at        mono.Time
}

func newWorker(cfg *Config, shard int, allConnected func()) (*worker, error) {
	w := &worker{
		cfg: cfg, shard: shard, allConnected: allConnected,
		stats: newStats(), accepted: verify.NewSet(len(cfg.Sources)),
		input: make([]byte, 64<<10),
	}
	for i := shard; i < len(cfg.Sources); i += cfg.Workers {
		hello, err := hello(cfg.Sources[i], cfg.Heartbeat)
		if err != nil {
			return nil, err
		}
		w.publishers = append(w.publishers, publisher{source: int32(i), target: cfg.Address, hello: hello})
	}
	if cfg.Stream != nil {
		w.stream = schedule.Shard(cfg.Stream(), shard, cfg.Workers)
	}
	return w, nil
}

// post has the worker do something; false: it has ended, and its fields change no more.
func (w *worker) post(do func()) bool {
	w.mu.Lock()
	ended, wake := w.mu.ended, w.mu.wake
	if !ended {
		w.mu.todo = append(w.mu.todo, do)
	}
	w.mu.Unlock()
	if wake != nil {
		wake()
	}
	return !ended
}

// doPosted does what was posted.
func (w *worker) doPosted() {
	w.mu.Lock()
	todo := w.mu.todo
	w.mu.todo = nil
	w.mu.Unlock()
	for _, do := range todo {
		do()
	}
}

// snapshot returns a copy of the worker's stats.
func (w *worker) snapshot() Stats {
	answer := make(chan Stats, 1)
	if w.post(func() { answer <- w.currentStats() }) {
		return <-answer
	}
	return w.currentStats()
}

func (w *worker) currentStats() Stats {
	s := w.stats.clone()
	s.Connected = w.connected
	if w.lost != nil {
		s.LastError = w.lost.Error()
	}
	return s
}

// run is the worker's life. It returns an error only if the poller fails.
func (w *worker) run() (err error) {
	defer w.end()
	if w.cfg.Portable {
		w.poll = newPortable()
	} else if w.poll, err = newPoller(); err != nil {
		w.poll = nil
		return err
	}
	w.mu.Lock()
	w.mu.wake = w.poll.wake
	w.mu.Unlock()
	// A thread of its own: the kernel wakes the thread, and no other goroutine
	// is scheduled in its place.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	now := clock.Mono()
	for i := range w.publishers {
		if p := &w.publishers[i]; p.target != "" {
			w.queueDial(p, now)
		}
	}
	if w.stream != nil {
		w.next, w.more = w.stream.Next()
	}
	w.nextTick = now
	for {
		w.doPosted()
		now = clock.Mono()
		if w.started && !w.stopped {
			now = w.sendDue(now)
		}
		if !now.Before(w.nextTick) {
			w.nextTick = now.Add(tick) // unless a dial is due before
			w.housekeep(now)
		}
		if w.finished(now) {
			return nil
		}
		if w.events, err = w.poll.wait(w.events[:0], w.wakeAt()); err != nil {
			return err
		}
		for _, e := range w.events {
			if l := w.links[e.slot]; l != nil && l.state != dead {
				w.handle(e, l)
			}
		}
		w.free = append(w.free, w.freed...)
		w.freed = w.freed[:0]
	}
}

// end closes everything.
func (w *worker) end() {
	for _, l := range w.links {
		if l != nil {
			w.abandon(l)
		}
	}
	if w.poll != nil {
		w.poll.shutdown()
	}
	for i := range w.publishers {
		w.stats.Skipped += uint64(w.publishers[i].waitingMessages)
	}
	w.connected, w.aborted = 0, true
	w.mu.Lock()
	w.mu.ended = true
	w.mu.Unlock()
	w.doPosted()
}

// stop ends the schedule.
func (w *worker) stop() {
	if !w.stopped {
		w.stopped = true
		w.drainEnds = clock.Mono().Add(w.cfg.Drain)
	}
}

// finished: there is nothing left to send or to wait for.
func (w *worker) finished(now mono.Time) bool {
	if w.aborted {
		return true
	}
	return w.stopped && (w.waiting == 0 && w.unanswered == 0 || !now.Before(w.drainEnds))
}

// wakeAt is when wait has to return if nothing happens.
func (w *worker) wakeAt() mono.Time {
	at := w.nextTick
	if w.started && !w.stopped && w.more {
		at = min(at, w.start.Add(w.next.At))
	}
	return at
}

// sendDue sends what is due and returns the time after.
func (w *worker) sendDue(now mono.Time) mono.Time {
	for range maxBurst {
		if !w.more {
			w.stop()
			return now
		}
		intended := w.start.Add(w.next.At)
		if now.Before(intended) {
			return now
		}
		e := w.next
		w.next, w.more = w.stream.Next()
		w.stats.Offered += uint64(e.Count)
		p := &w.publishers[int(e.Source)/w.cfg.Workers]
		b := batch{intended: intended, count: e.Count, size: e.Size}
		if p.displaced {
			w.stats.Skipped += uint64(b.count)
			continue
		}
		if p.waitingMessages == 0 && p.canSend(w.cfg.MaxOutstanding) {
			w.send(p, b, now)
			now = clock.Mono()
		} else {
			w.park(p, b)
		}
	}
	return now
}

// park keeps a batch until its publisher can send.
func (w *worker) park(p *publisher, b batch) {
	w.stats.Held += uint64(b.count)
	if p.waitingMessages+int(b.count) > w.cfg.MaxWaiting {
		w.stats.Skipped += uint64(b.count)
		return
	}
	if !p.parked {
		p.parked = true
		w.waiting++
	}
	p.waiting.Push(b)
	p.waitingMessages += int(b.count)
}

// unpark sends what waits, as far as possible. It may be entered again from
// within, when a write fails and the next link takes over: so a batch leaves
// the queue before it is sent.
func (w *worker) unpark(p *publisher) {
	for p.waiting.Len() > 0 && p.canSend(w.cfg.MaxOutstanding) {
		b := p.waiting.Pop()
		p.waitingMessages -= int(b.count)
		w.send(p, b, clock.Mono())
	}
	if p.parked && p.waiting.Len() == 0 {
		p.parked = false
		w.waiting--
	}
}

// send writes a batch.
//
// Requires: p.canSend.
func (w *worker) send(p *publisher, b batch, now mono.Time) {
	if p.seq+uint32(b.count) > verify.MaxSeq {
		w.stats.Skipped += uint64(b.count) // no number is left that a receiver would believe
		return
	}
	l := p.link
	size := bodySize(b.size)
	w.cmd, w.body = w.cmd[:0], w.body[:0]
	first := p.seq
	for range b.count {
		w.body = payload.Append(w.body, payload.Payload{
			Run: w.cfg.Run, Source: uint32(p.source), Seq: p.seq, Intended: b.intended,
		}, size)
		p.seq++
	}
	if w.cfg.Mpub && b.count > 1 {
		w.bodies = w.bodies[:0]
		for i := range int(b.count) {
			w.bodies = append(w.bodies, w.body[i*size:(i+1)*size])
		}
		w.cmd = wire.AppendMpub(w.cmd, w.cfg.Topic, w.bodies)
		l.open.Push(command{first, b.count, b.intended})
		w.unanswered++
	} else {
		for i := range int(b.count) {
			w.cmd = wire.AppendPub(w.cmd, w.cfg.Topic, w.body[i*size:(i+1)*size])
			l.open.Push(command{first + uint32(i), 1, b.intended})
		}
		w.unanswered += int(b.count)
	}
	w.stats.Sent += uint64(b.count)
	for range b.count {
		w.stats.Lateness.Record(now.Sub(b.intended))
		if w.cfg.Capture {
			w.captured = append(w.captured, now)
		}
	}
	w.write(l, w.cmd)
}

// write sends bytes on a link, keeping what the socket does not take.
func (w *worker) write(l *link, b []byte) {
	if len(l.out) > 0 {
		l.out = append(l.out, b...)
		return
	}
	n, err := w.poll.write(l.slot, b)
	switch {
	case err == nil:
	case errors.Is(err, errAgain):
		l.out = append(l.out, b[n:]...)
	default:
		w.lose(l, err)
	}
}

// flush sends what the socket did not take before.
func (w *worker) flush(l *link) {
	if len(l.out) == 0 {
		return
	}
	n, err := w.poll.write(l.slot, l.out)
	l.out = append(l.out[:0], l.out[n:]...)
	if err != nil && !errors.Is(err, errAgain) {
		w.lose(l, err)
	}
}

func (w *worker) handle(e event, l *link) {
	if l.state == dialling && (e.writable || e.readable) {
		err := w.poll.connected(e.slot)
		switch {
		case err == nil:
			l.state = identifying
			w.write(l, l.publisher.hello)
		case !errors.Is(err, errAgain):
			w.lose(l, err)
		}
	}
	if e.writable && l.state != dead {
		w.flush(l)
		if l.state == ready && l == l.publisher.link {
			w.unpark(l.publisher)
		}
	}
	if e.readable && (l.state == identifying || l.state == ready) {
		w.receive(e.slot, l)
	}
}

// receive reads until nothing is left, and handles the frames.
func (w *worker) receive(slot int32, l *link) {
	for {
		n, err := w.poll.read(slot, w.input)
		if err != nil {
			if !errors.Is(err, errAgain) {
				w.lose(l, err)
			}
			return
		}
		in := w.input[:n]
		if len(l.in) > 0 {
			l.in = append(l.in, in...)
			in = l.in
		}
		rest, err := w.frames(l, in, clock.Mono())
		if l.state == dead {
			return
		}
		if err != nil {
			w.stats.Strange++
			w.lose(l, err)
			return
		}
		l.in = append(l.in[:0], rest...)
		if n < len(w.input) {
			return
		}
	}
}

// frames handles every whole frame and returns the rest.
func (w *worker) frames(l *link, in []byte, now mono.Time) (rest []byte, err error) {
	for l.state != dead {
		kind, data, n, err := wire.ParseFrame(in, maxFrame)
		if err != nil || n == 0 {
			return in, err
		}
		in = in[n:]
		switch {
		case kind == wire.FrameResponse && string(data) == wire.Heartbeat:
			w.write(l, wire.AppendNop(nil))
		case l.state == identifying && kind == wire.FrameResponse:
			w.welcome(l, now)
		case l.state == identifying:
			return in, fmt.Errorf("IDENTIFY: %w", wire.ParseError(data))
		case kind == wire.FrameResponse && string(data) == wire.OK:
			if err := w.answer(l, nil, now); err != nil {
				return in, err
			}
		case kind == wire.FrameError:
			if err := w.answer(l, wire.ParseError(data), now); err != nil {
				return in, err
			}
		default:
			return in, fmt.Errorf("unexpected %v of %d bytes", kind, len(data))
		}
	}
	return in, nil
}

// answer settles the oldest open command of a link.
func (w *worker) answer(l *link, refusal *wire.Error, now mono.Time) error {
	if l.open.Len() == 0 {
		if refusal != nil {
			return fmt.Errorf("an error without a command: %w", refusal)
		}
		return errors.New("an OK without a command")
	}
	c := l.open.Pop()
	w.unanswered--
	if refusal != nil {
		w.stats.refuse(string(refusal.Code), uint64(c.count))
		w.lost = refusal // the reason, should the connection end now
	} else {
		w.stats.Accepted += uint64(c.count)
		latency := now.Sub(c.intended)
		for i := range uint32(c.count) {
			w.accepted.Add(uint32(l.publisher.source), c.seq+i)
			w.stats.Answer.Record(latency)
		}
		w.stats.LastAccepted = now
	}
	p := l.publisher
	switch {
	case l != p.link:
	case p.displaced && l.open.Len() == 0:
		w.disconnect(p)
	case p.switching() && l.open.Len() == 0:
		w.move(p)
	default:
		w.unpark(p)
	}
	return nil
}

// welcome makes a link usable after IDENTIFY.
func (w *worker) welcome(l *link, now mono.Time) {
	l.state = ready
	w.dials--
	p := l.publisher
	p.failures = 0
	switch {
	case p.link == nil:
		p.link, p.next = l, nil
		w.connected++
		w.openGate()
		w.unpark(p)
	case p.link.open.Len() == 0:
		w.move(p)
	default:
		// Wait for the old link's last answer; see answer and lose.
	}
	w.dialMore(now)
}

func (w *worker) openGate() {
	if !w.gateOpen && w.connected == len(w.publishers) {
		w.gateOpen = true
		w.allConnected()
	}
}

// move makes the next link the publisher's only one.
//
// Requires: the next link is ready; the old one is nil, dead, or has no open command.
func (w *worker) move(p *publisher) {
	if old := p.link; old != nil && old.state != dead {
		w.release(old)
	}
	p.link, p.next = p.next, nil
	w.stats.Moved++
	w.unpark(p)
}

// assign gives a publisher a new target.
func (w *worker) assign(a Assignment, now mono.Time) {
	p := &w.publishers[int(a.Source)/w.cfg.Workers]
	if a.Epoch < p.epoch {
		return
	}
	p.epoch, p.target, p.displaced = a.Epoch, a.Address, a.Address == ""
	if p.next != nil && p.next.address != p.target {
		w.drop(p.next)
		p.next = nil
	}
	if p.link != nil && p.link.address == p.target {
		if p.next != nil { // there and back again
			w.drop(p.next)
			p.next = nil
		}
		w.unpark(p)
		return
	}
	if p.displaced {
		if p.link != nil && p.link.open.Len() == 0 {
			w.disconnect(p)
		}
		return
	}
	if p.next == nil {
		w.queueDial(p, now)
	}
}

// disconnect ends the connection of a publisher that has no place.
//
// Requires: it has a link without an open command.
func (w *worker) disconnect(p *publisher) {
	w.release(p.link)
	p.link = nil
	w.connected--
}

// drop gives up a link that never became the publisher's.
func (w *worker) drop(l *link) {
	if l.state == dialling || l.state == identifying {
		w.dials--
	}
	w.release(l)
}

// release closes a link.
func (w *worker) release(l *link) {
	l.state = dead
	w.poll.close(l.slot)
	w.links[l.slot] = nil
	w.freed = append(w.freed, l.slot)
}

// abandon settles the open commands of a link that is lost.
func (w *worker) abandon(l *link) {
	for l.open.Len() > 0 {
		w.unanswered--
		w.stats.Unanswered += uint64(l.open.Pop().count)
	}
}

// lose is the end of a link that we did not want.
func (w *worker) lose(l *link, cause error) {
	p := l.publisher
	// The broker may be the first to end what we would.
	if !p.displaced || l.open.Len() > 0 {
		// A refusal that closes the connection says more than the end that follows.
		if !errors.Is(cause, io.EOF) || w.lost == nil {
			w.lost = fmt.Errorf("%s: %w", l.address, cause)
		}
		w.stats.Lost++
	}
	w.abandon(l)
	if l.state != ready {
		w.dials--
	}
	w.release(l)
	now := clock.Mono()
	if l == p.next {
		p.next = nil
		p.failures++
		w.queueDial(p, now.Add(backoff(p.failures)))
		w.unpark(p) // it may have waited to switch
		return
	}
	p.link = nil
	if p.switching() {
		w.move(p)
		return
	}
	w.connected--
	if p.next == nil {
		w.queueDial(p, now.Add(backoff(p.failures)))
	}
}

// backoff is the wait before the dial after n failures in a row.
func backoff(n uint) time.Duration {
	if n == 0 {
		return 0
	}
	return min(lastRetry, firstRetry<<min(n-1, 10))
}

// queueDial has the publisher connected to its target from `at` on.
func (w *worker) queueDial(p *publisher, at mono.Time) {
	if !p.queued && p.target != "" {
		p.queued = true
		w.redial = append(w.redial, retry{p, at})
		w.nextTick = min(w.nextTick, at)
	}
}

// dialMore starts dials that are due, as many as may run at once.
func (w *worker) dialMore(now mono.Time) {
	kept := w.redial[:0]
	for i, r := range w.redial {
		if w.dials >= maxDialling {
			kept = append(kept, w.redial[i:]...)
			break
		}
		if w.stopped && r.publisher.waitingMessages == 0 {
			kept = append(kept, r) // it has nothing to connect for
			continue
		}
		if now.Before(r.at) {
			kept = append(kept, r)
			w.nextTick = min(w.nextTick, r.at)
			continue
		}
		r.publisher.queued = false
		if !w.dial(r.publisher, now) {
			kept = append(kept, retry{r.publisher, now.Add(backoff(r.publisher.failures))})
			r.publisher.queued = true
		}
	}
	w.redial = kept
}

// dial begins the next link of a publisher; false: try again later.
func (w *worker) dial(p *publisher, now mono.Time) bool {
	if p.displaced || p.next != nil || p.link != nil && p.link.address == p.target {
		return true // settled meanwhile
	}
	var slot int32
	if n := len(w.free); n > 0 {
		slot, w.free = w.free[n-1], w.free[:n-1]
	} else {
		slot = int32(len(w.links))
		w.links = append(w.links, nil)
	}
	if err := w.poll.dial(slot, p.target); err != nil {
		w.free = append(w.free, slot)
		w.lost = fmt.Errorf("%s: %w", p.target, err)
		w.stats.Lost++
		p.failures++
		return false
	}
	l := &link{publisher: p, slot: slot, address: p.target, state: dialling, since: now}
	w.links[slot] = l
	p.next = l
	w.dials++
	return true
}

// housekeep looks after dials.
func (w *worker) housekeep(now mono.Time) {
	if w.dials > 0 {
		for _, l := range w.links {
			if l != nil && (l.state == dialling || l.state == identifying) && now.Sub(l.since) > helloTimeout {
				w.lose(l, fmt.Errorf("no connection and answer to IDENTIFY within %v", helloTimeout))
			}
		}
	}
	w.dialMore(now)
}
