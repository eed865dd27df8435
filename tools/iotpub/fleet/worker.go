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
	"github.com/srtm-io/srtm/mqtt/packet"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/tools/iotpub/payload"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/iotpub/verify"
)

const (
	// maxOut bounds the unsent bytes of a connection. Above maxOut the publisher waits.
	maxOut = 256 << 10
	// maxFrame bounds a reply. A publisher gets OK, heartbeats and errors.
	maxFrame = 64 << 10
	// maxDialling bounds the concurrent dials of a worker.
	maxDialling = 128
	// maxBurst bounds the events sent before the worker handles replies.
	maxBurst = 64
	// helloTimeout bounds dialling and IDENTIFY together.
	helloTimeout = 5 * time.Second
	// firstRetry is the wait before the second dial. The wait doubles up to lastRetry.
	firstRetry = 20 * time.Millisecond
	lastRetry  = time.Second
	// tick is the interval at which a worker checks its dials.
	tick = 50 * time.Millisecond
)

// worker owns every n-th publisher.
type worker struct {
	// mu guards functions that other goroutines post. The worker calls all posted
	// functions between two bursts; the callers bound their number.
	mu struct {
		sync.Mutex
		todo  []func()
		wake  func() // nil without a poller
		ended bool
	}

	// set once
	cfg          *Config
	shard        int
	allConnected func()

	// owned by run
	poll       *poller
	publishers []publisher
	links      []*link // by slot
	free       []int32 // slots
	freed      []int32 // slots that become free after the current events are handled
	redial     []retry // publishers waiting for a dial
	dials      int     // links that are dialling or identifying
	waiting    int     // publishers with waiting batches
	unanswered int     // commands without a reply
	connected  int     // publishers with a ready link
	gateOpen   bool    // allConnected was called

	stream    schedule.Stream
	next      schedule.Event
	hasNext   bool // next is valid
	start     mono.Time
	started   bool
	stopped   bool // the schedule has ended or was stopped
	drainEnds mono.Time
	aborted   bool
	nextTick  mono.Time
	nextPing  mono.Time // only MQTT

	stats     Stats
	accepted  *verify.Set
	captured  []mono.Time
	lastError error // error of the last lost connection

	// scratch
	body, cmd []byte
	bodies    [][]byte
	input     []byte
	events    []event
}

type retry struct {
	publisher *publisher
	due       mono.Time
}

func newWorker(cfg *Config, shard int, allConnected func()) (*worker, error) {
	w := &worker{
		cfg: cfg, shard: shard, allConnected: allConnected,
		stats: newStats(), accepted: verify.NewSet(len(cfg.Sources)),
		input: make([]byte, 64<<10),
	}
	for i := shard; i < len(cfg.Sources); i += cfg.Workers {
		p := publisher{source: int32(i), target: cfg.Address}
		if cfg.MQTT {
			p.hello, p.name = mqttHello(cfg.Sources[i], cfg), cfg.mqttName(cfg.Sources[i])
		} else {
			hello, err := hello(cfg.Sources[i], cfg.Heartbeat)
			if err != nil {
				return nil, err
			}
			p.hello = hello
		}
		w.publishers = append(w.publishers, p)
	}
	if cfg.Stream != nil {
		w.stream = schedule.Shard(cfg.Stream(), shard, cfg.Workers)
	}
	return w, nil
}

// post makes the worker call do. post returns false if the worker has ended; then the
// worker's fields no longer change.
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

// doPosted calls the posted functions.
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
	if w.lastError != nil {
		s.LastError = w.lastError.Error()
	}
	return s
}

// run runs the worker until the end. run returns an error only if the poller fails.
func (w *worker) run() (err error) {
	defer w.end()
	if w.poll, err = newPoller(); err != nil {
		return err
	}
	w.mu.Lock()
	w.mu.wake = w.poll.wake
	w.mu.Unlock()
	// On its own thread the kernel wakes the worker directly, and the Go scheduler runs no
	// other goroutine in its place.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	now := clock.Mono()
	for i := range w.publishers {
		if p := &w.publishers[i]; p.target != "" {
			w.queueDial(p, now)
		}
	}
	if w.stream != nil {
		w.next, w.hasNext = w.stream.Next()
	}
	w.nextTick = now
	for {
		w.doPosted()
		now = clock.Mono()
		if w.started && !w.stopped {
			now = w.sendDue(now)
		}
		if !now.Before(w.nextTick) {
			w.nextTick = now.Add(tick) // unless a dial is due earlier
			w.housekeep(now)
		}
		if w.finished(now) {
			return nil
		}
		w.events = w.poll.wait(w.events[:0], w.wakeAt())
		for _, e := range w.events {
			if l := w.links[e.slot]; l != nil && l.state != dead {
				w.handle(e, l)
			}
		}
		w.free = append(w.free, w.freed...)
		w.freed = w.freed[:0]
	}
}

// end closes all connections.
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

// finished reports whether nothing is left to send or to wait for.
func (w *worker) finished(now mono.Time) bool {
	if w.aborted {
		return true
	}
	return w.stopped && (w.waiting == 0 && w.unanswered == 0 || !now.Before(w.drainEnds))
}

// wakeAt is the time at which wait returns without events.
func (w *worker) wakeAt() mono.Time {
	wake := w.nextTick
	if w.started && !w.stopped && w.hasNext {
		wake = min(wake, w.start.Add(w.next.At))
	}
	return wake
}

// sendDue sends the batches that are due, and returns the current time.
func (w *worker) sendDue(now mono.Time) mono.Time {
	for range maxBurst {
		if !w.hasNext {
			w.stop()
			return now
		}
		intended := w.start.Add(w.next.At)
		if now.Before(intended) {
			return now
		}
		e := w.next
		w.next, w.hasNext = w.stream.Next()
		w.stats.Offered += uint64(e.Count)
		p := &w.publishers[int(e.Source)/w.cfg.Workers]
		b := batch{intended: intended, count: e.Count, size: e.Size}
		if p.displaced {
			w.stats.Skipped += uint64(b.count)
			continue
		}
		together := b.count
		if w.cfg.MQTT {
			together = 1 // the broker bounds the messages without a PUBACK
		}
		for ; b.count > 0; b.count -= together {
			now = w.offer(p, batch{b.intended, together, b.size}, now)
		}
	}
	return now
}

// offer sends a batch, or parks the batch until the publisher can send, and returns the current time.
func (w *worker) offer(p *publisher, b batch, now mono.Time) mono.Time {
	if p.waitingMessages > 0 || !p.canSend(w.cfg.MaxOutstanding) {
		w.park(p, b)
		return now
	}
	w.send(p, b, now)
	return clock.Mono()
}

// park stores a batch until the publisher can send.
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

// unpark sends as many waiting batches as possible. A failed write can call unpark
// recursively, when the next link takes over, so a batch leaves the queue before the write.
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
		// the receiver would reject larger numbers
		w.stats.Skipped += uint64(b.count)
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
		l.open.Push(command{first, b})
		w.unanswered++
	} else {
		for i := range int(b.count) {
			if body := w.body[i*size : (i+1)*size]; w.cfg.MQTT {
				w.cmd = packet.AppendPublish(w.cmd, packet.V5, p.name, packetID(first+uint32(i)), body)
			} else {
				w.cmd = wire.AppendPub(w.cmd, w.cfg.Topic, body)
			}
			l.open.Push(command{first + uint32(i), batch{b.intended, 1, b.size}})
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

// write writes bytes to a link, and stores the bytes that the socket does not accept.
func (w *worker) write(l *link, b []byte) {
	if len(l.unsent) > 0 {
		l.unsent = append(l.unsent, b...)
		return
	}
	n, err := w.poll.write(l.slot, b)
	switch {
	case err == nil:
	case errors.Is(err, errAgain):
		l.unsent = append(l.unsent, b[n:]...)
	default:
		w.handleLoss(l, err)
	}
}

// flush writes the stored bytes.
func (w *worker) flush(l *link) {
	if len(l.unsent) == 0 {
		return
	}
	n, err := w.poll.write(l.slot, l.unsent)
	l.unsent = append(l.unsent[:0], l.unsent[n:]...)
	if err != nil && !errors.Is(err, errAgain) {
		w.handleLoss(l, err)
	}
}

func (w *worker) handle(e event, l *link) {
	if l.state == dialling && (e.writable || e.readable) {
		err := w.poll.connected(e.slot)
		switch {
		case err == nil:
			l.state = identifying
			w.write(l, l.publisher.hello)
		default:
			w.handleLoss(l, err)
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

// receive reads all available bytes and handles the frames.
func (w *worker) receive(slot int32, l *link) {
	for {
		n, err := w.poll.read(slot, w.input)
		if err != nil {
			if !errors.Is(err, errAgain) {
				w.handleLoss(l, err)
			}
			return
		}
		in := w.input[:n]
		if len(l.received) > 0 {
			l.received = append(l.received, in...)
			in = l.received
		}
		handle := w.frames
		if w.cfg.MQTT {
			handle = w.packets
		}
		rest, err := handle(l, in, clock.Mono())
		if l.state == dead {
			return
		}
		if err != nil {
			w.stats.Strange++
			w.handleLoss(l, err)
			return
		}
		l.received = append(l.received[:0], rest...)
		if n < len(w.input) {
			return
		}
	}
}

// frames handles every complete frame and returns the rest.
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

// answer matches a reply with the oldest open command of a link.
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
		w.lastError = refusal // the probable cause, if the connection ends now
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

// welcome marks a link as ready after IDENTIFY.
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
		// Wait for the last reply on the old link; see answer and lose.
	}
	w.dialMore(now)
}

func (w *worker) openGate() {
	if !w.gateOpen && w.connected == len(w.publishers) {
		w.gateOpen = true
		w.allConnected()
	}
}

// move replaces the publisher's link with the next link.
//
// Requires: the next link is ready; the old link is nil, dead, or has no open command.
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
		if p.next != nil { // moved back to the old broker
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

// disconnect closes the connection of a displaced publisher.
//
// Requires: p has a link without an open command.
func (w *worker) disconnect(p *publisher) {
	w.release(p.link)
	p.link = nil
	w.connected--
}

// drop closes a link that never became the publisher's link.
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

// abandon counts the open commands of a lost link as unanswered.
func (w *worker) abandon(l *link) {
	for l.open.Len() > 0 {
		w.unanswered--
		w.stats.Unanswered += uint64(l.open.Pop().count)
	}
}

// handleLoss handles the unexpected end of a link.
func (w *worker) handleLoss(l *link, cause error) {
	p := l.publisher
	if w.cfg.MQTT {
		p.target = w.cfg.Address // the broker of a redirection may have ended
	}
	// The broker may close a displaced publisher's connection first.
	if !p.displaced || l.open.Len() > 0 {
		// A refusal that closes the connection says more than the EOF that follows.
		if !errors.Is(cause, io.EOF) || w.lastError == nil {
			w.lastError = fmt.Errorf("%s: %w", l.address, cause)
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
		w.unpark(p) // p may have waited for the switch
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

// backoff is the wait before the next dial after n failures in a row.
func backoff(n uint) time.Duration {
	if n == 0 {
		return 0
	}
	return min(lastRetry, firstRetry<<min(n-1, 10))
}

// queueDial schedules a dial to the publisher's target at the given time.
func (w *worker) queueDial(p *publisher, due mono.Time) {
	if !p.queued && p.target != "" {
		p.queued = true
		w.redial = append(w.redial, retry{p, due})
		w.nextTick = min(w.nextTick, due)
	}
}

// dialMore starts the dials that are due, up to maxDialling.
func (w *worker) dialMore(now mono.Time) {
	remaining := w.redial[:0]
	for i, r := range w.redial {
		if w.dials >= maxDialling {
			remaining = append(remaining, w.redial[i:]...)
			break
		}
		if w.stopped && r.publisher.waitingMessages == 0 {
			remaining = append(remaining, r) // nothing to send
			continue
		}
		if now.Before(r.due) {
			remaining = append(remaining, r)
			w.nextTick = min(w.nextTick, r.due)
			continue
		}
		r.publisher.queued = false
		if !w.dial(r.publisher, now) {
			remaining = append(remaining, retry{r.publisher, now.Add(backoff(r.publisher.failures))})
			r.publisher.queued = true
		}
	}
	w.redial = remaining
}

// dial starts the next link of a publisher. dial returns false if the caller must retry.
func (w *worker) dial(p *publisher, now mono.Time) bool {
	if p.displaced || p.next != nil || p.link != nil && p.link.address == p.target {
		return true // no longer needed
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
		w.lastError = fmt.Errorf("%s: %w", p.target, err)
		w.stats.Lost++
		p.failures++
		return false
	}
	l := &link{publisher: p, slot: slot, address: p.target, state: dialling, dialStart: now}
	w.links[slot] = l
	p.next = l
	w.dials++
	return true
}

// housekeep fails slow dials and starts new dials.
func (w *worker) housekeep(now mono.Time) {
	if w.dials > 0 {
		for _, l := range w.links {
			if l != nil && (l.state == dialling || l.state == identifying) && now.Sub(l.dialStart) > helloTimeout {
				w.handleLoss(l, fmt.Errorf("no connection and answer to IDENTIFY or CONNECT within %v", helloTimeout))
			}
		}
	}
	if w.cfg.MQTT {
		w.ping(now)
	}
	w.dialMore(now)
}
