package conn

import (
	"container/heap"
	"crypto/tls"
	"errors"
	"fmt"
	"math"
	"net"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/poll"
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
	poller *poll.Poller

	slots  []*slot // by number; nil: free
	vacant []int32
	due    dueHeap
	dirty  []*slot // connections to flush, or to check for their end
	turn   uint32  // generation of slots: distinguishes connections that reused a number

	// Scratch memory, shared by all connections in turn.
	buf       []byte          // read buffer
	task      task            // the current command
	took      int             // bytes read from sockets since the last flushAll
	fed       []*slot         // subscribers that were sent messages in this turn
	going     broker.Outgoing // frames to write
	sealed    []byte          // frames to write, encrypted
	offloaded sync.WaitGroup
	commits   commits

	effort effort
	leaver order // if to is set, all connections move to loop to, and then this loop ends
	inbox  inbox
}

// Sizes, in bytes.
const (
	// loopBuffer is the maximum size of one read.
	loopBuffer = 64 << 10
	// copied is the largest part of an unfinished command that is moved in front of the next read.
	// A larger part stays in a buffer of the connection's own.
	copied = 4 << 10
	// repliesOwed limits the unwritten replies of a connection. At the limit the loop stops reading
	// from the connection.
	repliesOwed = 64 << 10
)

// slot is a connection on a loop. Owned by the loop's goroutine, or by the goroutine of its
// offloaded operation while away is set.
type slot struct {
	// Set once.
	*client
	fd int

	loop *loop // changed only by the goroutine that set queued
	work bulk

	secure *secure // nil without TLS

	number int32 // index in loop.slots
	turn   uint32
	phase  phase
	place  int       // index in loop.due; -1: none
	at     mono.Time // next time at which expire checks the connection
	events uint32    // the events registered with the poller

	// Output that the socket did not accept.
	pending []byte
	owed    broker.Outgoing // to record once pending is written; its Frames are not used
	writeBy mono.Time       // end of WriteTimeout

	until mono.Time // end of lingering or, with parted, of waiting for the offloaded operation
	left  int64     // bytes to discard while lingering

	held    task // operation that the loop may not carry out
	err     error
	away    bool // an offloaded operation is in progress
	parted  bool // the peer closed its side while away was set
	deliver bool // the subscription may have messages
	listed  bool // in loop.dirty
	linger  bool // linger once pending is written

	// Atomic.
	queued atomic.Bool // in the loop's inbox
	back   atomic.Bool // set last by the offloaded operation

	// closing keeps the descriptor open while an offloaded operation uses it.
	closing sync.Mutex
	lost    bool // the descriptor is closed; written by the loop, with closing held
}

// Methods of driver.

func (s *slot) interrupt()        { s.post() }
func (s *slot) cut()              { s.post() }
func (s *slot) notify()           { s.post() }
func (s *slot) nonblocking() bool { return !s.away }

// The loop itself writes the output, at the end of its turn.
func (s *slot) reply() error { return nil }

func (s *slot) subscribed() error {
	s.closing.Lock()
	defer s.closing.Unlock()
	if !s.lost { // a lost descriptor may belong to another connection now
		s.in.Ignore()
	}
	return nil
}

func (s *slot) admits(op *session.Op, now mono.Time) error {
	switch {
	case op.Kind == session.OpSub && s.env.cfg.StrictBuffering:
		return errLeaves
	case s.away:
	case op.Kind == session.OpAuth, op.Kind == session.OpSub, op.Kind == session.OpTLS,
		op.Kind.Publishes() && s.env.cfg.Auth != nil && !now.Before(s.cred.expires):
		return errWaits
	}
	return nil
}

func (s *slot) arrival(start, end int64) stamp.Arrival {
	if s.away { // otherwise the caller is the loop, which alone closes the descriptor
		s.closing.Lock()
		defer s.closing.Unlock()
		if s.lost {
			return stamp.Arrival{At: clock.Mono(), Source: stamp.Read}
		}
	}
	return s.in.Arrival(start, end)
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
	p, err := poll.New()
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

// take starts to serve an accepted connection. Any goroutine may call it.
func (l *loop) take(fd int, remote string) {
	c := newClient(l.env, remote)
	s := &slot{client: c, loop: l, fd: fd}
	c.setDriver(s)
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
		if ended || l.leaver.to != nil && idle && l.effort.connections.Load() == 0 {
			return
		}
		l.poller.Alarm(l.due.next())
		events := l.poller.Wait(idle)
		if idle {
			l.inbox.awake()
		}
		began := clock.Mono()
		l.effort.begins()
		for i := range events {
			l.serve(&events[i])
			if l.took >= loopBuffer {
				l.partialFlush()
			}
		}
		carriedOut := clock.Mono()
		l.takeInbox()
		l.commits.start(&l.offloaded) // commands of events and of the inbox
		l.flushAll()
		l.forget()
		now := clock.Mono()
		l.env.slow.note(CauseCommands, began, carriedOut)
		l.env.slow.note(CauseOutput, carriedOut, now)
		if !now.Before(l.due.next()) {
			l.expire(now)
			l.env.slow.note(CauseTimers, now, clock.Mono())
		}
		l.effort.ends(now.Sub(began))
		l.group.due(now)
		if o.to != nil {
			l.carryOut(o)
		} else if l.leaver.to != nil {
			l.giveAll(l.leaver.to)
		}
	}
}

// partialFlush writes the turn's output so far, and reads from the subscribers that were sent
// messages. Without it, publishers with full sockets would publish more messages in a turn than RDY
// allows to deliver. The waiting messages would take fresh memory, which is not in the processor's
// cache.
func (l *loop) partialFlush() {
	n := len(l.fed)
	for i := range n {
		if s := l.fed[i]; !s.away && s.phase == open && s.events&unix.EPOLLIN != 0 {
			l.readable(s)
		}
	}
	l.fed = append(l.fed[:0], l.fed[n:]...)
	l.takeInbox()
	l.flushAll()
	l.took = 0
}

// forget clears the state of one turn.
func (l *loop) forget() {
	clear(l.fed)
	l.fed, l.took = l.fed[:0], 0
}

func (l *loop) close() {
	l.commits.committer.stop()
	l.offloaded.Wait()
	l.commits.committer.close()
	l.inbox.close()
	if l.leaver.to != nil {
		l.group.done()
	}
}

func (l *loop) serve(e *poll.Event) {
	s := l.slots[e.Fd]
	if s == nil || s.turn != uint32(e.Pad) {
		return // the event's connection ended earlier in this turn
	}
	if s.away {
		l.leaves(s, e.Events)
		return
	}
	if e.Events&unix.EPOLLOUT != 0 {
		l.writable(s)
	}
	if e.Events&^unix.EPOLLOUT != 0 && s.phase != gone {
		l.readable(s)
	}
}

// takeInbox checks the posted connections.
func (l *loop) takeInbox() {
	taken := l.inbox.take()
	for _, s := range taken {
		s.queued.Store(false) // first, so that later posts queue the slot again
		s.deliver = true
		switch {
		case s.phase == gone:
		case s.phase == arriving:
			l.open(s)
		case s.away && s.back.Load():
			l.returned(s)
		case s.away && s.severed.Load():
			l.abandon(s)
		case s.away:
		case s.severed.Load():
			l.fail(s, net.ErrClosed)
		default:
			l.touch(s)
			if s.unread() {
				l.readable(s)
			}
		}
	}
	clear(taken)
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
	s.place = -1
	l.effort.connections.Add(1)
	if s.in == nil { // otherwise the connection comes from another loop
		s.in = l.env.stamps.TrackSocket(hook.Socket{FD: s.fd})
	}
	err := l.watch(s)
	if err == nil && s.severed.Load() {
		err = net.ErrClosed
	}
	if err != nil {
		l.fail(s, err)
		return
	}
	l.due.noLater(s, s.due())
	l.touch(s) // the connection may have to end already
}

// watch registers the events that the connection needs now.
func (l *loop) watch(s *slot) error {
	want := uint32(0)
	switch {
	case s.lost:
		return nil
	case s.away && !s.parted:
		want = unix.EPOLLRDHUP
	case !s.away:
		if s.phase != ending && len(s.pending) < repliesOwed {
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

// touch lists the connection for flushAll.
func (l *loop) touch(s *slot) {
	if !s.listed {
		s.listed = true
		l.dirty = append(l.dirty, s)
	}
}

// readable reads once. The rest of the input causes another event, except data that TLS has read
// ahead, which readable reads, too.
func (l *loop) readable(s *slot) {
	for l.readOnce(s); s.unread(); l.readOnce(s) {
		if l.took >= loopBuffer {
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
	if own := s.w - s.r; own <= copied {
		n := copy(l.buf, s.buf[s.r:s.w])
		s.giveBack()
		s.buf, s.w = l.buf, n
	} else if !s.makeRoom() {
		l.touch(s)
		return
	}
	took, err := s.read()
	l.took += took
	l.effort.worked(s, took)
	if s.unsent() {
		l.touch(s)
	}
	switch {
	case errors.Is(err, hook.ErrAgain):
		l.keep(s)
	case err != nil:
		l.keep(s)
		if isEnd(err) {
			err = nil
		} else {
			err = fmt.Errorf("read: %w", err)
		}
		l.finish(s, err, false)
	default:
		err := s.consume(&l.task)
		if errors.Is(err, errWaits) || errors.Is(err, errLeaves) {
			s.held = l.task
		}
		l.consumed(s, err)
	}
}

// consumed continues after consume, according to its error.
func (l *loop) consumed(s *slot, err error) {
	switch {
	case errors.Is(err, errWaits):
		l.offload(s)
		return
	case errors.Is(err, errLeaves):
		l.handOff(s)
		return
	}
	l.keep(s)
	if err != nil {
		l.finish(s, err, false)
		return
	}
	l.due.noLater(s, s.due())
	if len(s.sess.Output()) > 0 || s.ended() {
		l.touch(s)
	}
}

// keep copies unconsumed bytes from the loop's buffer to a buffer of the connection's own. A
// connection without unconsumed bytes keeps no buffer.
func (l *loop) keep(s *slot) {
	rest := s.buf[s.r:s.w]
	if len(s.buf) == 0 || &s.buf[0] != &l.buf[0] {
		if len(rest) == 0 {
			s.giveBack()
		}
		if !s.holds(len(s.buf)) {
			s.giveBack()
		}
		return
	}
	read := s.buf[:s.w]
	s.buf, s.r, s.w = nil, 0, len(rest)
	if len(rest) > 0 {
		s.buf = s.env.buffers.get(len(rest))
		copy(s.buf, rest)
		if !s.holds(len(s.buf)) {
			s.giveBack()
		}
	}
	poison(read) // the next connection overwrites the buffer
}

// lend leaves the loop's buffer to the connection, because the held operation refers to it.
func (l *loop) lend(s *slot) {
	if &s.buf[0] == &l.buf[0] {
		l.buf = l.env.buffers.get(loopBuffer)
	}
}

// offload makes a goroutine carry out the held operation and all commands that were read after it.
func (l *loop) offload(s *slot) {
	l.lend(s)
	s.away, s.parted = true, false
	s.back.Store(false)
	if l.commits.join(s) {
		return
	}
	l.offloaded.Go(func() {
		t := s.held
		s.held = task{}
		now := clock.Mono()
		s.err = s.flushBatch(now)
		if s.err == nil && t.op.Kind != session.OpNone {
			s.err = s.carryOut(&t, now)
		}
		if s.err == nil {
			s.err = s.consume(&t)
		}
		if errors.Is(s.err, errLeaves) {
			s.held = t
		}
		s.back.Store(true)
		s.post()
	})
}

// leaves handles an event on a connection with an offloaded operation:
//   - An error or a hang-up closes the descriptor. The operation's result is dropped.
//   - After new data, the loop only watches for the peer's end.
//   - If the peer has closed only its own side, it may still wait for the answer. The loop keeps
//     the descriptor for lingerTime.
func (l *loop) leaves(s *slot, events uint32) {
	switch {
	case s.lost:
	case events&(unix.EPOLLHUP|unix.EPOLLERR) != 0:
		l.abandon(s)
	case s.events != unix.EPOLLRDHUP && !s.parted:
		if l.watch(s) != nil {
			l.abandon(s)
		}
	case events&unix.EPOLLRDHUP != 0 && !s.parted:
		s.parted = true
		s.until = clock.Mono().Add(lingerTime)
		l.due.noLater(s, s.until)
		if l.watch(s) != nil {
			l.abandon(s)
		}
	}
}

// abandon closes the descriptor of a connection that is away, and cancels its request to an auth
// server. The rest of the connection ends when the offloaded operation returns.
func (l *loop) abandon(s *slot) {
	if s.lost {
		return
	}
	if s.events != 0 {
		_ = l.poller.Watch(s.fd, s.number, s.turn, s.events, 0)
		s.events = 0
	}
	s.closing.Lock()
	s.lost = true
	err := unix.Close(s.fd)
	s.closing.Unlock()
	if err != nil {
		s.logEnd(fmt.Errorf("close: %w", err))
	}
	s.abort()
}

// returned continues a connection after its offloaded operation.
func (l *loop) returned(s *slot) {
	s.away = false
	if s.severed.Load() {
		l.fail(s, net.ErrClosed)
		return
	}
	if err := l.watch(s); err != nil {
		l.fail(s, err)
		return
	}
	l.consumed(s, s.err)
	if s.phase == open {
		l.touch(s)
	}
	if s.unread() {
		s.post()
	}
}

// handOff moves the connection to a goroutine, with the held operation and the unwritten output.
func (l *loop) handOff(s *slot) {
	l.lend(s)
	out, err := l.seal(s, s.sess.Output())
	if err != nil {
		l.fail(s, err)
		return
	}
	owed := append(s.pending, out...)
	s.sess.ClearOutput()
	held := s.held
	l.leave(s)
	nc, err := polled(s.fd, s.remote)
	if err != nil {
		s.in.Release()
		s.giveBack()
		s.leaveTopics()
		s.logEnd(fmt.Errorf("hand over to a goroutine: %w", err))
		l.env.clients.left(s.client)
		return
	}
	var t *tls.Conn
	switch in := s.in.(type) {
	case *hook.Conn:
		in.Move(nc)
	case *hook.Layer:
		s.secure.Move(nc)
		t = s.secure.tls
	}
	g := newGoroutine(s.client, nc)
	if s.severed.Load() { // cut may have closed the slot instead of the goroutine's connection
		nc.Close()
	}
	go func() {
		defer l.env.clients.left(s.client)
		g.end(g.goOn(owed, t, &held))
	}()
}

// flushAll writes the turn's output and ends the connections that are due to end.
func (l *loop) flushAll() {
	for i := 0; i < len(l.dirty); i++ { // dirty may grow meanwhile
		s := l.dirty[i]
		s.listed = false
		if s.away || s.phase != open {
			continue
		}
		if err := l.flush(s); err != nil {
			l.fail(s, err)
		} else if s.ended() {
			l.finish(s, s.cause(), true)
		}
	}
	clear(l.dirty)
	l.dirty = l.dirty[:0]
}

// flush writes the replies and, for a subscriber, messages.
func (l *loop) flush(s *slot) error {
	replies := s.sess.Output()
	if len(s.pending) > 0 { // replies queue behind pending
		out, err := l.seal(s, replies)
		s.pending = append(s.pending, out...)
		s.sess.ClearOutput()
		return errors.Join(err, l.watch(s))
	}
	if s.sub == nil || !s.deliver {
		if len(replies) == 0 && !s.unsent() {
			return nil
		}
		out, err := l.seal(s, replies)
		if err != nil {
			return err
		}
		n, err := poll.Write(s.fd, out)
		l.effort.worked(s, n)
		if err == nil && n < len(out) {
			err = l.owe(s, out[n:])
		}
		s.sess.ClearOutput()
		return err
	}
	for more := true; more && len(s.pending) == 0; {
		g := &l.going
		g.Reset()
		g.Frames = append(g.Frames, s.sess.Output()...)
		s.sess.ClearOutput()
		most := len(g.Frames) + loopGather
		if !s.sub.Take(g, most) {
			s.quitting.Store(true) // the channel is gone, so the connection ends
		}
		more = len(g.Frames) >= most // otherwise all messages are taken, and notify reports new messages
		if len(g.Frames) == 0 && !s.unsent() {
			break
		}
		work(g.Messages())
		out, err := l.seal(s, g.Frames)
		if err != nil {
			return err
		}
		n, err := poll.Write(s.fd, out)
		if err != nil {
			return err
		}
		l.effort.worked(s, n)
		if n < len(out) {
			s.owed, *g = *g, s.owed
			if err := l.owe(s, out[n:]); err != nil {
				return err
			}
			s.owed.Frames = nil
			return nil // deliver is still set
		}
		l.wrote(s, g)
		poison(g.Frames)
	}
	if cap(l.going.Frames) > 2*loopGather {
		l.going.Frames = nil
	}
	s.deliver = false
	return nil
}

// wrote records the messages that are on the socket.
func (l *loop) wrote(s *slot, g *broker.Outgoing) {
	if n := g.Messages(); n > 0 {
		s.sub.Wrote(g)
		add(&s.stats.messages, n)
		if k := len(l.fed); k == 0 || l.fed[k-1] != s {
			l.fed = append(l.fed, s)
		}
	}
}

// owe keeps output that the socket does not accept now.
func (l *loop) owe(s *slot, rest []byte) error {
	s.pending = append([]byte(nil), rest...)
	s.writeBy = clock.Mono().Add(l.env.cfg.WriteTimeout)
	l.due.noLater(s, s.due())
	return l.watch(s)
}

// writable writes pending output.
func (l *loop) writable(s *slot) {
	n, err := poll.Write(s.fd, s.pending)
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
		if s.sub != nil {
			l.wrote(s, &s.owed)
		}
		s.owed = broker.Outgoing{}
		if s.phase == ending {
			l.parting(s)
			return
		}
		l.touch(s)
	}
	l.due.noLater(s, s.due())
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
	s.logEnd(err)
	s.giveBack()
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
		l.parting(s)
		return
	}
	if err := l.watch(s); err != nil {
		l.shut(s)
	}
}

// release releases what the connection holds in the broker.
func (l *loop) release(s *slot) {
	s.client.release()
	s.sub = nil
}

// parting follows the last write of a connection that ends.
func (l *loop) parting(s *slot) {
	if !s.linger || unix.Shutdown(s.fd, unix.SHUT_WR) != nil {
		l.shut(s)
		return
	}
	now := clock.Mono()
	if s.until = s.lingerUntil(now); !now.Before(s.until) {
		l.shut(s)
		return
	}
	s.phase = lingering
	s.left = int64(math.MaxInt64)
	if closing, _ := s.sess.Closing(); closing {
		s.left = lingerBytes
	}
	l.due.noLater(s, s.due())
	if l.watch(s) != nil {
		l.shut(s)
	}
}

// discard reads and drops the input of a lingering connection.
func (l *loop) discard(s *slot) {
	n, err := poll.Read(s.fd, l.buf)
	s.left -= int64(n)
	if err != nil || s.left <= 0 {
		l.shut(s)
	}
}

// fail ends a connection at once, because of an error or a cut.
func (l *loop) fail(s *slot, err error) {
	if s.phase == gone {
		return
	}
	sub := s.sub != nil
	l.release(s)
	if err = ignoreClosed(err); err != nil && sub {
		l.env.log.Debug("subscriber lost", obs.KeyRemote, s.remote, obs.KeyError, err)
	} else {
		s.logEnd(err)
	}
	l.shut(s)
}

func (l *loop) shut(s *slot) {
	s.in.Release()
	s.giveBack()
	s.events = 0 // closing the only descriptor removes it from the poller
	l.leave(s)
	if !s.lost {
		if err := unix.Close(s.fd); err != nil {
			s.logEnd(fmt.Errorf("close: %w", err))
		}
	}
	l.env.clients.left(s.client)
}

// leave removes the connection from the loop.
func (l *loop) leave(s *slot) {
	// The descriptor may live on, so the poller must forget it.
	if s.events != 0 {
		_ = l.poller.Watch(s.fd, s.number, s.turn, s.events, 0)
		s.events = 0
	}
	s.phase = gone
	s.pending, s.owed = nil, broker.Outgoing{}
	l.slots[s.number] = nil
	l.vacant = append(l.vacant, s.number)
	l.effort.connections.Add(-1)
	if s.place >= 0 {
		heap.Remove(&l.due, s.place)
	}
}

func (l *loop) carryOut(o order) {
	if o.ends {
		l.leaver = o
		l.giveAll(o.to)
		return
	}
	left := uint64(o.part * float64(l.effort.work.before))
	for _, s := range l.slots {
		if s == nil {
			continue
		}
		s.work.at(l.effort.work.epoch)
		if w := uint64(s.work.before); w > 0 && w <= left && l.give(s, o.to) {
			left -= w
		}
	}
	l.group.done()
}

// giveAll moves all connections that can move now. The others move in a later turn.
func (l *loop) giveAll(to *loop) {
	for _, s := range l.slots {
		if s != nil {
			l.give(s, to)
		}
	}
}

// give moves a connection to another loop. It returns false if the connection is away, has pending
// output, or is about to be checked. The bytes of an incomplete command move along.
func (l *loop) give(s *slot, to *loop) bool {
	if s.phase != open || s.away || s.listed || len(s.pending) > 0 || s.queued.Swap(true) {
		return false
	}
	l.leave(s)
	s.phase, s.loop = arriving, to
	to.inbox.put(s)
	return true
}

// due returns the time of the connection's next timer.
func (s *slot) due() mono.Time {
	at := mono.Never
	switch s.phase {
	case open:
		at = s.sess.Deadline()
	case lingering:
		at = s.until
	}
	if len(s.pending) > 0 {
		at = min(at, s.writeBy)
	}
	return at
}

var errWriteTimeout = errors.New("the peer takes nothing")

// expire handles the connections whose timers are due.
func (l *loop) expire(now mono.Time) {
	for len(l.due) > 0 && !now.Before(l.due[0].at) {
		s := l.due[0]
		if s.away { // the offloaded operation owns the session, so heartbeats wait
			if s.parted && !s.lost && !now.Before(s.until) {
				l.abandon(s)
			}
			s.at = now.Add(lingerTime)
			heap.Fix(&l.due, s.place)
			continue
		}
		switch at := s.due(); {
		case now.Before(at):
		case s.phase == lingering:
			l.shut(s)
			continue
		case len(s.pending) > 0 && !now.Before(s.writeBy):
			l.fail(s, errWriteTimeout)
			continue
		default:
			s.sess.Tick(now)
			l.touch(s)
		}
		if s.at = s.due(); s.at == mono.Never {
			heap.Remove(&l.due, s.place)
		} else {
			heap.Fix(&l.due, s.place)
		}
	}
	l.flushAll()
}

// dueHeap orders connections by their next timer.
type dueHeap []*slot

func (h dueHeap) next() mono.Time {
	if len(h) == 0 {
		return mono.Never
	}
	return h[0].at
}

// noLater makes expire check the connection at the given time or earlier. A timer that moves to a
// later time keeps its place, because an early check is cheap.
func (h *dueHeap) noLater(s *slot, at mono.Time) {
	switch {
	case s.place < 0 && at != mono.Never:
		s.at = at
		heap.Push(h, s)
	case s.place >= 0 && at < s.at:
		s.at = at
		heap.Fix(h, s.place)
	}
}

func (h dueHeap) Len() int           { return len(h) }
func (h dueHeap) Less(i, j int) bool { return h[i].at < h[j].at }
func (h dueHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].place, h[j].place = i, j
}

func (h *dueHeap) Push(x any) {
	s := x.(*slot)
	s.place = len(*h)
	*h = append(*h, s)
}

func (h *dueHeap) Pop() any {
	last := len(*h) - 1
	s := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	s.place = -1
	return s
}
