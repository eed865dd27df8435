package conn

import (
	"container/heap"
	"crypto/tls"
	"errors"
	"fmt"
	"math"
	"net"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/rawfd"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsqd/broker"
)

// loop serves many connections with one goroutine. In each turn it waits until some connections
// have input, reads the input, carries out the commands, and then writes replies and messages, with
// one write for each connection. Work that may block (an auth server, a new topic, a full disk, an
// fsync, a TLS handshake) is offloaded to a goroutine; only its own connection waits for that
// goroutine. A connection that negotiates compression moves to the goroutine driver.
//
// Owned by the loop's goroutine, except inbox.
type loop struct {
	// Set once.
	env    *env
	group  *loops
	number int // distinguishes the loops of a server
	poller *rawfd.Poller

	slots  []*slot // by number; nil: free
	vacant []int32
	timers timerHeap
	dirty  []*slot // connections to flush, or to check for their end
	turn   uint32  // generation of slots: distinguishes connections that reused a number

	// Scratch memory, shared by all connections in turn.
	buf       []byte          // read buffer
	task      task            // the current command
	readBytes int             // bytes read from sockets since the last flushAll
	delivered []*slot         // subscribers that were sent messages and not read since, see partialFlush
	outgoing  broker.Outgoing // frames to write
	sealed    []byte          // frames to write, encrypted
	offloaded sync.WaitGroup
	commits   commits

	effort     effort
	finalOrder order // if to is set, all connections move to loop to, and then this loop ends
	inbox      inbox
}

// Sizes, in bytes.
const (
	// loopBuffer is the maximum size of one read.
	loopBuffer = 64 << 10
	// copied is the largest part of an unfinished command that is moved in front of the next read.
	// A larger part stays in a buffer of the connection's own.
	copied = 4 << 10
	// maxFollowed is the maximum number of subscribers that partialFlush reads because they were
	// sent messages in an earlier turn. A read without input takes a thousandth of the time in
	// which publishers fill loopBuffer.
	maxFollowed = 16
	// maxPendingReplies limits the unwritten replies of a connection. At the limit the loop stops
	// reading from the connection.
	maxPendingReplies = 64 << 10
)

// slot is a connection on a loop. Owned by the loop's goroutine, or by the goroutine of its
// offloaded operation while offloaded is set.
type slot struct {
	// Set once.
	client *client
	fd     int

	loop *loop // changed only by the goroutine that set queued
	work workCount

	secure *secure // nil without TLS

	number    int32 // index in loop.slots
	turn      uint32
	phase     phase
	heapIndex int       // index in loop.timers; -1: none
	checkAt   mono.Time // next time at which expire checks the connection
	events    uint32    // the events registered with the poller

	// Output that the socket did not accept.
	pending    []byte
	unrecorded broker.Outgoing // to record once pending is written; its Frames are not used
	writeBy    mono.Time       // end of WriteTimeout

	lingerEnd   mono.Time // end of lingering or, with peerClosed, of waiting for the offloaded operation
	discardLeft int64     // bytes to discard while lingering

	heldTask   task    // operation that the loop may not carry out
	verdict    verdict // of the offloaded operation
	err        error   // of the offloaded operation
	offloaded  bool    // an offloaded operation is in progress
	peerClosed bool    // the peer closed its side while offloaded was set
	deliver    bool    // the subscription may have messages
	dirty      bool    // in loop.dirty
	linger     bool    // linger once pending is written

	// Atomic.
	queued    atomic.Bool // in the loop's inbox
	completed atomic.Bool // set last by the offloaded operation

	// fdMu keeps the descriptor open while an offloaded operation uses it.
	fdMu     sync.Mutex
	fdClosed bool // the descriptor is closed; written by the loop, with fdMu held
}

// Methods of driver and signals.

func (s *slot) interrupt()        { s.post() }
func (s *slot) cut()              { s.post() }
func (s *slot) notify()           { s.post() }
func (s *slot) nonblocking() bool { return !s.offloaded }

// The loop itself writes the output, at the end of its turn.
func (s *slot) reply() error { return nil }

func (s *slot) subscribed() error {
	s.fdMu.Lock()
	defer s.fdMu.Unlock()
	if !s.fdClosed && s.client.mqtt == nil { // a closed descriptor may belong to another connection now
		s.client.in.Ignore()
	}
	return nil
}

func (s *slot) admits(op *session.Op, now mono.Time) verdict {
	switch {
	case op.Kind == session.OpSub && s.client.env.cfg.StrictBuffering, op.Kind.Upgrade() && op.Kind != session.OpTLS:
		return mustMove
	case s.offloaded:
	case op.Kind == session.OpAuth, op.Kind == session.OpSub, op.Kind >= session.OpConnect && op.Kind <= session.OpTLS,
		op.Kind.Publishes() && s.client.env.cfg.Auth != nil && !now.Before(s.client.cred.expires):
		return mustWait
	}
	return carriedOut
}

func (s *slot) arrival(start, end int64) stamp.Arrival {
	if s.offloaded { // otherwise the caller is the loop, which alone closes the descriptor
		s.fdMu.Lock()
		defer s.fdMu.Unlock()
		if s.fdClosed {
			return stamp.Arrival{At: clock.Mono(), Source: stamp.Read}
		}
	}
	return s.client.in.Arrival(start, end)
}

// phase is a connection's stage of life.
type phase uint8

const (
	arriving  phase = iota // not registered with the poller yet
	open                   //
	ending                 // the last output is being written
	lingering              // the peer has time to read the last output
	gone                   // closed, or moved to a goroutine or another loop
)

func newLoop(g *loops, number int) (*loop, error) {
	p, err := rawfd.NewPoller()
	if err != nil {
		return nil, err
	}
	return &loop{env: g.env, group: g, number: number, poller: p, inbox: inbox{poller: p}, buf: g.env.buffers.get(loopBuffer)}, nil
}

// post makes the connection's loop check the connection. Any goroutine may call post, at any time.
// It does not block. The goroutine that sets queued may use s.loop until the slot is in that loop's
// inbox.
func (s *slot) post() {
	if !s.queued.Swap(true) {
		s.loop.inbox.put(s)
	}
}

// serve starts to serve an accepted connection. Any goroutine may call it.
func (l *loop) serve(fd int, remote string, p Protocol) {
	c := newClient(l.env, remote, p)
	s := &slot{client: c, loop: l, fd: fd}
	c.setDriver(s, s)
	if !l.env.enter(c) {
		unix.Close(fd)
		return
	}
	s.post()
}

// run serves until stop. A loop that was ordered to end also returns once it has no connections.
func (l *loop) run() {
	defer l.close()
	for {
		o, idle, ended := l.inbox.next()
		if ended || l.finalOrder.to != nil && idle && l.effort.connections.Load() == 0 {
			return
		}
		l.poller.Alarm(l.timers.next())
		events := l.poller.Wait(idle)
		if idle {
			l.inbox.markAwake()
		}
		began := clock.Mono()
		l.effort.beginTurn()
		for i := range events {
			l.handleEvent(&events[i])
			if l.readBytes >= loopBuffer {
				l.partialFlush()
			}
		}
		carriedOut := clock.Mono()
		l.drainInbox()
		l.commits.start(&l.offloaded) // commands of events and of the inbox
		l.flushAll()
		l.resetTurn()
		now := clock.Mono()
		l.env.slow.note(CauseCommands, began, carriedOut)
		l.env.slow.note(CauseOutput, carriedOut, now)
		if !now.Before(l.timers.next()) {
			l.expire(now)
			l.env.slow.note(CauseTimers, now, clock.Mono())
		}
		l.effort.endTurn(now.Sub(began))
		l.group.lookIfDue(now)
		if o.to != nil || l.finalOrder.to != nil {
			l.forgetDelivered()
		}
		if o.to != nil {
			l.carryOut(o)
		} else if l.finalOrder.to != nil {
			l.moveAll(l.finalOrder.to)
		}
	}
}

// partialFlush writes the turn's output so far, and reads from the subscribers that were sent
// messages. Without it, publishers with full sockets would publish more messages in a turn than RDY
// allows to deliver. The waiting messages would take fresh memory, which is not in the processor's
// cache. Most messages of a turn are sent at the end of the turn, so the subscribers of the turn
// before are read, too: their own events come after all publishers.
func (l *loop) partialFlush() {
	n := len(l.delivered)
	for i := range n {
		if s := l.delivered[i]; !s.offloaded && s.phase == open && s.events&unix.EPOLLIN != 0 && !s.client.paused {
			l.readable(s)
		}
	}
	l.delivered = append(l.delivered[:0], l.delivered[n:]...)
	l.drainInbox()
	l.flushAll()
	l.readBytes = 0
}

// resetTurn clears the state of one turn, except the last subscribers in delivered.
func (l *loop) resetTurn() {
	l.delivered = slices.Delete(l.delivered, 0, max(0, len(l.delivered)-maxFollowed))
	l.delivered = slices.DeleteFunc(l.delivered, func(s *slot) bool { return !s.offloaded && s.phase != open })
	l.readBytes = 0
}

// forgetDelivered precedes the move of connections to another loop, which owns their slots then.
func (l *loop) forgetDelivered() {
	clear(l.delivered)
	l.delivered = l.delivered[:0]
}

func (l *loop) close() {
	l.commits.committer.stop()
	l.offloaded.Wait()
	l.commits.committer.close()
	l.inbox.close()
	if l.finalOrder.to != nil {
		l.group.orderDone()
	}
}

func (l *loop) handleEvent(e *rawfd.Event) {
	s := l.slots[e.Fd]
	if s == nil || s.turn != uint32(e.Pad) {
		return // the event's connection ended earlier in this turn
	}
	if s.offloaded {
		l.handlePeerClose(s, e.Events)
		return
	}
	if e.Events&unix.EPOLLOUT != 0 {
		l.writable(s)
	}
	if e.Events&^unix.EPOLLOUT != 0 && s.phase != gone && !s.client.paused { // the inbox has a paused connection
		l.readable(s)
	}
}

// drainInbox checks the posted connections.
func (l *loop) drainInbox() {
	drained := l.inbox.drain()
	for _, s := range drained {
		s.queued.Store(false) // first, so that later posts queue the slot again
		s.deliver = true
		switch {
		case s.phase == gone:
		case s.phase == arriving:
			l.open(s)
		case s.offloaded && s.completed.Load():
			l.completeOffload(s)
		case s.offloaded && s.client.severed.Load():
			l.abandon(s)
		case s.offloaded:
		case s.client.severed.Load():
			l.fail(s, net.ErrClosed)
		default:
			l.markDirty(s)
			if s.unread() {
				l.readable(s)
			}
		}
	}
	clear(drained)
}

// open starts to serve a connection.
func (l *loop) open(s *slot) {
	if n := len(l.vacant) - 1; n >= 0 {
		s.number, l.vacant = l.vacant[n], l.vacant[:n]
	} else {
		s.number = int32(len(l.slots))
		l.slots = append(l.slots, nil)
	}
	l.turn++
	s.turn = l.turn
	l.slots[s.number] = s
	s.phase = open
	s.heapIndex = -1
	l.effort.connections.Add(1)
	if s.client.in == nil { // otherwise the connection comes from another loop
		s.client.in = l.env.stamps.TrackSocket(hook.Socket{FD: s.fd})
	}
	err := l.watch(s)
	if err == nil && s.client.severed.Load() {
		err = net.ErrClosed
	}
	if err != nil {
		l.fail(s, err)
		return
	}
	l.timers.noLater(s, s.nextTimer())
	l.markDirty(s) // the connection may have to end already
}

// watch registers the events that the connection needs now.
func (l *loop) watch(s *slot) error {
	want := uint32(0)
	switch {
	case s.fdClosed:
		return nil
	case s.offloaded && !s.peerClosed:
		want = unix.EPOLLRDHUP
	case !s.offloaded:
		if s.phase != ending && len(s.pending) < maxPendingReplies {
			want |= unix.EPOLLIN
		}
		if len(s.pending) > 0 {
			want |= unix.EPOLLOUT
		}
	}
	if want == s.events {
		return nil
	}
	err := l.poller.Watch(s.fd, s.number, s.turn, s.events, want)
	if err == nil {
		s.events = want
	}
	return err
}

// markDirty lists the connection for flushAll.
func (l *loop) markDirty(s *slot) {
	if !s.dirty {
		s.dirty = true
		l.dirty = append(l.dirty, s)
	}
}

// readable reads once. The rest of the input causes another event, except data that TLS has read
// ahead, which readable reads, too. A paused connection continues in the next turn.
func (l *loop) readable(s *slot) {
	for l.readOnce(s); s.unread(); l.readOnce(s) {
		if s.client.paused || l.readBytes >= loopBuffer {
			s.post()
			return
		}
	}
}

func (l *loop) readOnce(s *slot) {
	switch s.phase {
	case lingering:
		l.discard(s)
		return
	case ending:
		l.fail(s, nil) // the peer has hung up
		return
	}
	unconsumed := s.client.w - s.client.r
	switch {
	case s.client.paused:
	case unconsumed <= copied:
		n := copy(l.buf, s.client.buf[s.client.r:s.client.w])
		s.client.releaseBuffer()
		s.client.buf, s.client.w = l.buf, n
	case !s.client.makeRoom():
		l.markDirty(s)
		return
	}
	var n int
	var err error
	switch {
	case s.client.paused:
	case s.client.awaitsTLS: // the handshake reads the bytes
		s.client.awaitsTLS = false
	default:
		n, err = s.read()
	}
	l.readBytes += n
	l.effort.addWork(s, n)
	if s.unsent() {
		l.markDirty(s)
	}
	switch {
	case errors.Is(err, hook.ErrAgain):
		l.keepUnread(s)
	case err != nil:
		l.keepUnread(s)
		if isEnd(err) {
			err = nil
		} else {
			err = fmt.Errorf("read: %w", err)
		}
		l.finish(s, err, false)
	default:
		v, err := s.client.consume(&l.task)
		if v != carriedOut {
			s.heldTask = l.task
		}
		l.afterConsume(s, v, err)
	}
}

// read reads the available bytes of the stream. socketBytes counts the bytes read from the socket.
func (s *slot) read() (socketBytes int, err error) {
	if s.secure != nil {
		return s.readTLS()
	}
	n, err := s.client.in.Read(s.client.buf[s.client.w:])
	s.client.w += n
	return n, err
}

// unread reports whether the loop must read from the connection although no event will come.
func (s *slot) unread() bool {
	return s.phase == open && !s.offloaded && len(s.pending) < maxPendingReplies && (s.client.paused || s.secure != nil && s.secure.buffered)
}

// afterConsume continues after consume, according to its results.
func (l *loop) afterConsume(s *slot, v verdict, err error) {
	switch v {
	case mustWait:
		l.offload(s)
		return
	case mustMove:
		l.handOff(s)
		return
	}
	l.keepUnread(s)
	if err != nil {
		l.finish(s, err, false)
		return
	}
	l.timers.noLater(s, s.nextTimer())
	if len(s.client.sess.Output()) > 0 || s.client.ended() {
		l.markDirty(s)
	}
}

// keepUnread copies unconsumed bytes from the loop's buffer to a buffer of the connection's own. A
// connection without unconsumed bytes keeps no buffer.
func (l *loop) keepUnread(s *slot) {
	rest := s.client.buf[s.client.r:s.client.w]
	if len(s.client.buf) == 0 || &s.client.buf[0] != &l.buf[0] {
		if len(rest) == 0 {
			s.client.releaseBuffer()
		}
		if !s.client.env.memory.charge(s.client, len(s.client.buf)) {
			s.client.releaseBuffer()
		}
		return
	}
	read := s.client.buf[:s.client.w]
	s.client.buf, s.client.r, s.client.w = nil, 0, len(rest)
	if len(rest) > 0 {
		s.client.buf = s.client.env.buffers.get(len(rest))
		copy(s.client.buf, rest)
		if !s.client.env.memory.charge(s.client, len(s.client.buf)) {
			s.client.releaseBuffer()
		}
	}
	poison(read) // the next connection overwrites the buffer
}

// lendBuffer leaves the loop's buffer to the connection, because the held operation refers to it.
func (l *loop) lendBuffer(s *slot) {
	if len(s.client.buf) > 0 && &s.client.buf[0] == &l.buf[0] {
		l.buf = l.env.buffers.get(loopBuffer)
	}
}

// offload makes a goroutine carry out the held operation and all commands that were read after it.
func (l *loop) offload(s *slot) {
	l.lendBuffer(s)
	s.offloaded, s.peerClosed = true, false
	s.completed.Store(false)
	if l.commits.join(s) {
		return
	}
	l.offloaded.Go(func() {
		t := s.heldTask
		s.heldTask = task{}
		now := clock.Mono()
		s.verdict, s.err = s.client.flushBatch(now), nil
		if s.verdict == carriedOut && t.op.Kind != session.OpNone {
			s.verdict, s.err = s.client.carryOut(&t, now)
		}
		if s.verdict == carriedOut && s.err == nil {
			s.verdict, s.err = s.client.consume(&t)
		}
		if s.verdict == mustMove {
			s.heldTask = t
		}
		s.completed.Store(true)
		s.post()
	})
}

// handlePeerClose handles an event on a connection with an offloaded operation:
//   - An error or a hang-up closes the descriptor. The operation's result is dropped.
//   - After new data, the loop only watches for the peer's end.
//   - If the peer has closed only its own side, it may still wait for the answer. The loop keeps
//     the descriptor for lingerTime.
func (l *loop) handlePeerClose(s *slot, events uint32) {
	switch {
	case s.fdClosed:
	case events&(unix.EPOLLHUP|unix.EPOLLERR) != 0:
		l.abandon(s)
	case s.events != unix.EPOLLRDHUP && !s.peerClosed:
		if l.watch(s) != nil {
			l.abandon(s)
		}
	case events&unix.EPOLLRDHUP != 0 && !s.peerClosed:
		s.peerClosed = true
		s.lingerEnd = clock.Mono().Add(lingerTime)
		l.timers.noLater(s, s.lingerEnd)
		if l.watch(s) != nil {
			l.abandon(s)
		}
	}
}

// abandon closes the descriptor of a connection with an offloaded operation, and cancels its
// request to an auth server. The rest of the connection ends when the offloaded operation returns.
func (l *loop) abandon(s *slot) {
	if s.fdClosed {
		return
	}
	if s.events != 0 {
		_ = l.poller.Watch(s.fd, s.number, s.turn, s.events, 0)
		s.events = 0
	}
	s.fdMu.Lock()
	s.fdClosed = true
	err := unix.Close(s.fd)
	s.fdMu.Unlock()
	if err != nil {
		s.client.logEnd(fmt.Errorf("close: %w", err))
	}
	s.client.abort()
}

// completeOffload continues a connection after its offloaded operation.
func (l *loop) completeOffload(s *slot) {
	s.offloaded = false
	if s.client.severed.Load() {
		l.fail(s, net.ErrClosed)
		return
	}
	if err := l.watch(s); err != nil {
		l.fail(s, err)
		return
	}
	l.afterConsume(s, s.verdict, s.err)
	if s.phase == open {
		l.markDirty(s)
	}
	if s.unread() {
		s.post()
	}
}

// handOff moves the connection to a goroutine, with the held operation and the unwritten output.
func (l *loop) handOff(s *slot) {
	l.lendBuffer(s)
	out, err := l.seal(s, s.client.sess.Output())
	if err != nil {
		l.fail(s, err)
		return
	}
	output := append(s.pending, out...)
	s.client.sess.ClearOutput()
	held := s.heldTask
	l.detach(s)
	nc, err := netConn(s.fd, s.client.remote)
	if err != nil {
		s.client.in.Release()
		s.client.releaseBuffer()
		s.client.pubs.leaveTopics()
		s.client.logEnd(fmt.Errorf("hand over to a goroutine: %w", err))
		l.env.clients.remove(s.client)
		return
	}
	var t *tls.Conn
	switch in := s.client.in.(type) {
	case *hook.Conn:
		in.Move(nc)
	case *hook.Layer:
		s.secure.Move(nc)
		t = s.secure.tls
	}
	g := newGoroutine(s.client, nc)
	if s.client.severed.Load() { // cut may have closed the slot instead of the goroutine's connection
		nc.Close()
	}
	go func() {
		defer l.env.clients.remove(s.client)
		g.end(g.resume(output, t, &held))
	}()
}

// flushAll writes the turn's output and ends the connections that are due to end.
func (l *loop) flushAll() {
	for i := 0; i < len(l.dirty); i++ { // dirty may grow meanwhile
		s := l.dirty[i]
		s.dirty = false
		if s.offloaded || s.phase != open {
			continue
		}
		if err := l.flush(s); err != nil {
			l.fail(s, err)
		} else if s.client.ended() {
			l.finish(s, s.client.cause(), true)
		} else if s.client.mqtt != nil && s.client.mqtt.Stale() {
			l.offload(s)
		}
	}
	clear(l.dirty)
	l.dirty = l.dirty[:0]
}

// flush writes the replies and, for a subscriber, messages.
func (l *loop) flush(s *slot) error {
	replies := s.client.sess.Output()
	if len(s.pending) > 0 { // replies queue behind pending
		out, err := l.seal(s, replies)
		s.pending = append(s.pending, out...)
		s.client.sess.ClearOutput()
		return errors.Join(err, l.watch(s))
	}
	if s.client.sub == nil || !s.deliver {
		if len(replies) == 0 && !s.unsent() {
			return nil
		}
		out, err := l.seal(s, replies)
		if err != nil {
			return err
		}
		n, err := rawfd.Send(s.fd, out)
		l.effort.addWork(s, n)
		if err == nil && n < len(out) {
			err = l.deferOutput(s, out[n:])
		}
		s.client.sess.ClearOutput()
		return err
	}
	for more := true; more && len(s.pending) == 0; {
		g := &l.outgoing
		g.Reset()
		g.Encoder = s.client.encoder
		g.Frames = append(g.Frames, s.client.sess.Output()...)
		s.client.sess.ClearOutput()
		limit := len(g.Frames) + loopGather
		if !s.client.deliveries.Take(g, limit) {
			s.client.quitting.Store(true) // the channel is gone, so the connection ends
		}
		more = len(g.Frames) >= limit // otherwise all messages are taken, and notify reports new messages
		if len(g.Frames) == 0 && !s.unsent() {
			break
		}
		work(g.Messages())
		out, err := l.seal(s, g.Frames)
		if err != nil {
			return err
		}
		n, err := rawfd.Send(s.fd, out)
		if err != nil {
			return err
		}
		l.effort.addWork(s, n)
		if n < len(out) {
			s.unrecorded, *g = *g, s.unrecorded
			if err := l.deferOutput(s, out[n:]); err != nil {
				return err
			}
			s.unrecorded.Frames = nil
			return nil // deliver is still set
		}
		l.wrote(s, g)
		poison(g.Frames)
	}
	if cap(l.outgoing.Frames) > 2*loopGather {
		l.outgoing.Frames = nil
	}
	s.deliver = false
	return nil
}

// seal returns the bytes to write to the socket for b: b itself without TLS. They are valid until the next
// call.
func (l *loop) seal(s *slot, b []byte) ([]byte, error) {
	if s.secure == nil {
		return b, nil
	}
	return l.sealTLS(s, b)
}

// unsent reports whether TLS has output to write.
func (s *slot) unsent() bool { return s.secure != nil && len(s.secure.out) > 0 }

// wrote records the messages that are on the socket.
func (l *loop) wrote(s *slot, g *broker.Outgoing) {
	if n := g.Messages(); n > 0 {
		s.client.deliveries.Wrote(g)
		add(&s.client.stats.messages, n)
		if !slices.Contains(l.delivered[max(0, len(l.delivered)-maxFollowed):], s) {
			l.delivered = append(l.delivered, s)
		}
	}
}

// deferOutput keeps output that the socket does not accept now.
func (l *loop) deferOutput(s *slot, rest []byte) error {
	s.pending = append([]byte(nil), rest...)
	s.writeBy = clock.Mono().Add(l.env.cfg.WriteTimeout)
	l.timers.noLater(s, s.nextTimer())
	return l.watch(s)
}

// writable writes pending output.
func (l *loop) writable(s *slot) {
	n, err := rawfd.Send(s.fd, s.pending)
	if err != nil {
		l.fail(s, err)
		return
	}
	if n > 0 {
		s.writeBy = clock.Mono().Add(l.env.cfg.WriteTimeout)
		s.pending = s.pending[n:]
	}
	if len(s.pending) == 0 {
		s.pending = nil
		if s.client.sub != nil {
			l.wrote(s, &s.unrecorded)
		}
		s.unrecorded = broker.Outgoing{}
		if s.phase == ending {
			l.startLinger(s)
			return
		}
		l.markDirty(s)
	}
	l.timers.noLater(s, s.nextTimer())
	if err := l.watch(s); err != nil {
		l.fail(s, err)
		return
	}
	if s.unread() {
		s.post()
	}
}

// finish ends a connection in order. It first writes the pending output. With linger, the peer then
// has time to read the output.
func (l *loop) finish(s *slot, err error, linger bool) {
	if s.phase != open {
		return
	}
	l.release(s)
	s.client.logEnd(err)
	s.client.releaseBuffer()
	s.phase, s.linger = ending, linger
	err = l.flush(s)
	if err == nil && s.secure != nil {
		_ = s.secure.tls.CloseWrite() // without an open socket the peer needs no close_notify
		err = l.flush(s)
	}
	if err != nil {
		l.shut(s)
		return
	}
	if len(s.pending) == 0 {
		l.startLinger(s)
		return
	}
	if err := l.watch(s); err != nil {
		l.shut(s)
	}
}

// release releases what the connection holds in the broker.
func (l *loop) release(s *slot) {
	s.client.release()
	s.client.sub, s.client.deliveries = nil, nil
}

// startLinger starts to linger after the last write of a connection that ends.
func (l *loop) startLinger(s *slot) {
	if !s.linger || unix.Shutdown(s.fd, unix.SHUT_WR) != nil {
		l.shut(s)
		return
	}
	now := clock.Mono()
	if s.lingerEnd = s.client.lingerUntil(now); !now.Before(s.lingerEnd) {
		l.shut(s)
		return
	}
	s.phase = lingering
	s.discardLeft = int64(math.MaxInt64)
	if closing, _ := s.client.sess.Closing(); closing {
		s.discardLeft = lingerBytes
	}
	l.timers.noLater(s, s.nextTimer())
	if l.watch(s) != nil {
		l.shut(s)
	}
}

// discard reads and drops the input of a lingering connection.
func (l *loop) discard(s *slot) {
	n, err := rawfd.Receive(s.fd, l.buf)
	s.discardLeft -= int64(n)
	if err != nil || s.discardLeft <= 0 {
		l.shut(s)
	}
}

// fail ends a connection at once, because of an error or a cut.
func (l *loop) fail(s *slot, err error) {
	if s.phase == gone {
		return
	}
	sub := s.client.sub != nil
	l.release(s)
	if err = ignoreClosed(err); err != nil && sub {
		l.env.log.Debug("subscriber lost", obs.KeyRemote, s.client.remote, obs.KeyError, err)
	} else {
		s.client.logEnd(err)
	}
	l.shut(s)
}

func (l *loop) shut(s *slot) {
	s.client.in.Release()
	s.client.releaseBuffer()
	s.events = 0 // closing the only descriptor removes it from the poller
	l.detach(s)
	if !s.fdClosed {
		if err := unix.Close(s.fd); err != nil {
			s.client.logEnd(fmt.Errorf("close: %w", err))
		}
	}
	l.env.clients.remove(s.client)
}

// detach removes the connection from the loop.
func (l *loop) detach(s *slot) {
	// The descriptor may live on, so the poller must forget it.
	if s.events != 0 {
		_ = l.poller.Watch(s.fd, s.number, s.turn, s.events, 0)
		s.events = 0
	}
	s.phase = gone
	s.pending, s.unrecorded = nil, broker.Outgoing{}
	l.slots[s.number] = nil
	l.vacant = append(l.vacant, s.number)
	l.effort.connections.Add(-1)
	if s.heapIndex >= 0 {
		heap.Remove(&l.timers, s.heapIndex)
	}
}

func (l *loop) carryOut(o order) {
	if o.final {
		l.finalOrder = o
		l.moveAll(o.to)
		return
	}
	remaining := uint64(o.share * float64(l.effort.work.previous))
	for _, s := range l.slots {
		if s == nil {
			continue
		}
		s.work.advance(l.effort.work.epoch)
		if w := uint64(s.work.previous); w > 0 && w <= remaining && l.moveConn(s, o.to) {
			remaining -= w
		}
	}
	l.group.orderDone()
}

// moveAll moves all connections that can move now. The others move in a later turn.
func (l *loop) moveAll(to *loop) {
	for _, s := range l.slots {
		if s != nil {
			l.moveConn(s, to)
		}
	}
}

// moveConn moves a connection to another loop. It returns false if the connection is offloaded, has
// pending output, or is about to be checked. The bytes of an incomplete command move along.
func (l *loop) moveConn(s *slot, to *loop) bool {
	if s.phase != open || s.offloaded || s.dirty || len(s.pending) > 0 || s.queued.Swap(true) {
		return false
	}
	l.detach(s)
	s.phase, s.loop = arriving, to
	to.inbox.put(s)
	return true
}
