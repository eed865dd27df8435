package conn

import (
	"container/heap"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/poll"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsqd/broker"
)

// loop is the driver of many connections by one goroutine: it waits until some
// of them have something, reads what there is, has it carried out, and then
// writes the replies and messages that came of it, one write for each
// connection. What may wait (an auth server, a new topic, a full disk, an fsync)
// is done by a goroutine of its own, an errand, which the connection waits for
// and nobody else. A connection that is to be encrypted or compressed leaves for
// the goroutine driver.
//
// Owned by the loop's goroutine, but for inbox.
type loop struct {
	// Set once.
	srv    *Server
	poller *poll.Poller

	seats  []*client // by number; nil: free
	vacant []int32
	due    dueHeap
	dirty  []*client // have something to be written, or an end to be looked at
	turn   uint32    // tells apart the connections that had one number

	// Memory that all connections share while they have their turn.
	buf    []byte          // read into
	took   int             // bytes read since the last flush of all
	fed    []*client       // subscribers that were written messages in this turn
	going  broker.Outgoing // written from
	errand sync.WaitGroup

	inbox struct {
		sync.Mutex
		clients []*client
		asleep  bool // the goroutine waits, or is about to
		stop    bool
	}
	taken []*client // inbox.clients of the turn before
}

// Sizes, in bytes.
const (
	// loopBuffer is what one read takes at most.
	loopBuffer = 64 << 10
	// copied is how much of an unfinished command is moved in front of the next
	// read; more than that stays in a buffer of the connection's own.
	copied = 4 << 10
	// repliesOwed is how much a connection that takes nothing may let pile up
	// before it is read from no longer.
	repliesOwed = 64 << 10
)

// seat is a connection's place on a loop. Owned by the loop's goroutine, and
// while it is away by its errand.
type seat struct {
	// Set once.
	fd int

	number int32 // in loop.seats
	turn   uint32
	phase  phase
	place  int       // in loop.due; -1: not
	at     mono.Time // when it is due
	events uint32    // that the poller was asked for

	// What the socket did not take.
	pending []byte
	owed    broker.Outgoing // recorded when pending is written; its Frames are not used
	writeBy mono.Time       // when WriteTimeout is over

	until mono.Time // of lingering, or of waiting for the errand after parted
	left  int64     // bytes to discard then

	held    task // what the loop may not carry out
	err     error
	away    bool        // on an errand, with the connection
	parted  bool        // the peer ended its side meanwhile
	patient bool        // in an errand
	ready   bool        // messages may be there for the subscriber
	listed  bool        // in loop.dirty
	linger  bool        // once pending is written
	back    atomic.Bool // the errand is done; it sets it last

	// closing orders the descriptor's end and its use by an errand.
	closing sync.Mutex
	lost    bool // the descriptor is closed; written by the loop, with closing held
}

// lock reports whether the connection has its descriptor; then it keeps it until
// unlock.
func (s *seat) lock() bool {
	if !s.patient {
		return true // the loop is who would close it
	}
	s.closing.Lock()
	lost := s.lost
	if lost {
		s.closing.Unlock()
	}
	return !lost
}

func (s *seat) unlock() {
	if s.patient {
		s.closing.Unlock()
	}
}

// phase is how far a connection is.
type phase uint8

const (
	arriving  phase = iota // not with the poller yet
	open                   //
	ending                 // the last output is being written
	lingering              // the peer is given time to read it
	gone                   // closed, or left for a goroutine
)

func newLoop(s *Server) (*loop, error) {
	p, err := poll.New()
	if err != nil {
		return nil, err
	}
	return &loop{srv: s, poller: p, buf: s.buffers.get(loopBuffer)}, nil
}

// post has the loop look at a connection. Any goroutine may call it, at any
// time; it does not block.
func (l *loop) post(c *client) {
	if c.queued.Swap(true) {
		return
	}
	l.inbox.Lock()
	l.inbox.clients = append(l.inbox.clients, c)
	l.wakeLocked()
	l.inbox.Unlock()
}

// wakeLocked ends the loop's wait, if there is one. The write is made under the
// lock, so that the descriptor is not closed meanwhile; it does not block.
func (l *loop) wakeLocked() {
	if l.inbox.asleep {
		l.inbox.asleep = false
		l.poller.Wake()
	}
}

func (l *loop) sever(c *client) {
	c.severed.Store(true)
	l.post(c)
}

// stop ends the loop. Requires: it has no connection any more.
func (l *loop) stop() {
	l.inbox.Lock()
	l.inbox.stop = true
	l.wakeLocked()
	l.inbox.Unlock()
}

// run serves until stop.
func (l *loop) run() {
	defer l.close()
	for {
		l.inbox.Lock()
		if l.inbox.stop {
			l.inbox.Unlock()
			return
		}
		idle := len(l.inbox.clients) == 0
		l.inbox.asleep = idle
		l.inbox.Unlock()
		l.poller.Alarm(l.due.next())
		events := l.poller.Wait(idle)
		if idle {
			l.inbox.Lock()
			l.inbox.asleep = false
			l.inbox.Unlock()
		}
		began := clock.Mono()
		for i := range events {
			l.serve(&events[i])
			if l.took >= loopBuffer {
				l.breathe()
			}
		}
		carriedOut := clock.Mono()
		l.takeInbox()
		l.flushAll()
		l.forget()
		now := clock.Mono()
		l.srv.slow.note(CauseCommands, began, carriedOut)
		l.srv.slow.note(CauseOutput, carriedOut, now)
		if !now.Before(l.due.next()) {
			l.expire(now)
			l.srv.slow.note(CauseTimers, now, clock.Mono())
		}
	}
}

// breathe writes in the middle of a turn what it has brought so far, and reads
// the subscribers that were written to before: publishers who fill their sockets
// would else put in more for each turn than RDY lets out, and what piles up is
// memory that is not used again but taken anew, and cold.
func (l *loop) breathe() {
	n := len(l.fed)
	for i := range n {
		if c := l.fed[i]; c.seat != nil && !c.seat.away && c.seat.phase == open && c.seat.events&unix.EPOLLIN != 0 {
			l.readable(c)
		}
	}
	l.fed = append(l.fed[:0], l.fed[n:]...)
	l.takeInbox()
	l.flushAll()
	l.took = 0
}

// forget ends what is kept during a turn.
func (l *loop) forget() {
	clear(l.fed)
	l.fed, l.took = l.fed[:0], 0
}

// close frees what the loop has. What nobody serves any more is closed.
func (l *loop) close() {
	l.errand.Wait()
	l.inbox.Lock()
	defer l.inbox.Unlock()
	l.inbox.asleep = false // nobody is to be woken
	l.poller.Close()
}

// serve does what an event is about.
func (l *loop) serve(e *poll.Event) {
	c := l.seats[e.Fd]
	if c == nil || c.seat.turn != uint32(e.Pad) {
		return // of a connection that ended earlier in this turn
	}
	if c.seat.away {
		l.leaves(c, e.Events)
		return
	}
	if e.Events&unix.EPOLLOUT != 0 {
		l.writable(c)
	}
	if e.Events&^unix.EPOLLOUT != 0 && c.seat.phase != gone {
		l.readable(c)
	}
}

// takeInbox looks at the connections that somebody posted.
func (l *loop) takeInbox() {
	l.inbox.Lock()
	l.inbox.clients, l.taken = l.taken[:0], l.inbox.clients
	l.inbox.Unlock()
	for _, c := range l.taken {
		c.queued.Store(false) // first: who posts it from now on has news
		s := c.seat
		if s == nil {
			continue // it has left
		}
		s.ready = true
		switch {
		case s.phase == gone:
		case s.phase == arriving:
			l.open(c)
		case s.away && s.back.Load():
			l.returned(c)
		case s.away && c.severed.Load():
			l.abandon(c)
		case s.away:
		case c.severed.Load():
			l.fail(c, net.ErrClosed)
		default:
			l.touch(c)
		}
	}
	clear(l.taken)
}

// open begins to serve a connection.
func (l *loop) open(c *client) {
	s := c.seat
	if n := len(l.vacant) - 1; n >= 0 {
		s.number, l.vacant = l.vacant[n], l.vacant[:n]
	} else {
		s.number = int32(len(l.seats))
		l.seats = append(l.seats, nil)
	}
	l.turn++
	s.turn = l.turn
	l.seats[s.number] = c
	s.phase = open
	s.place = -1
	c.in = l.srv.stamps.TrackSocket(hook.Socket{FD: s.fd})
	if err := l.watch(c); err != nil {
		l.fail(c, err)
		return
	}
	l.schedule(c)
	l.touch(c) // it may be to end already
}

// watch asks the poller for what the connection waits for now.
func (l *loop) watch(c *client) error {
	s := c.seat
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
func (l *loop) touch(c *client) {
	if s := c.seat; !s.listed {
		s.listed = true
		l.dirty = append(l.dirty, c)
	}
}

// readable reads once; what is left makes another event.
func (l *loop) readable(c *client) {
	s := c.seat
	switch s.phase {
	case lingering:
		l.discard(c)
		return
	case ending:
		l.fail(c, nil) // the peer has hung up
		return
	}
	if own := c.w - c.r; own <= copied {
		n := copy(l.buf, c.buf[c.r:c.w])
		c.giveBack()
		c.buf, c.w = l.buf, n
	} else if !c.makeRoom() {
		l.touch(c)
		return
	}
	n, err := c.in.Read(c.buf[c.w:])
	c.w += n
	l.took += n
	switch {
	case errors.Is(err, hook.ErrAgain):
		l.keep(c)
	case err != nil:
		l.keep(c)
		l.hungUp(c, err)
	default:
		l.consumed(c, c.consume())
	}
}

// hungUp ends a connection that cannot be read any more.
func (l *loop) hungUp(c *client, err error) {
	if isEnd(err) {
		err = nil
	} else {
		err = c.readFault(err)
	}
	l.finish(c, err, false)
}

// consumed goes on after consume.
func (l *loop) consumed(c *client, err error) {
	switch {
	case errors.Is(err, errWaits):
		l.sendAway(c)
		return
	case errors.Is(err, errLeaves):
		l.dismiss(c)
		return
	}
	l.keep(c)
	if err != nil {
		l.finish(c, err, false)
		return
	}
	l.schedule(c)
	if len(c.sess.Output()) > 0 || c.ended() {
		l.touch(c)
	}
}

// keep lets the connection keep what it did not consume, in memory of its own,
// and nothing else.
func (l *loop) keep(c *client) {
	rest := c.buf[c.r:c.w]
	if len(c.buf) == 0 || &c.buf[0] != &l.buf[0] {
		if len(rest) == 0 {
			c.giveBack()
		}
		if !c.holds(len(c.buf)) {
			c.giveBack()
		}
		return
	}
	read := c.buf[:c.w]
	c.buf, c.r, c.w = nil, 0, len(rest)
	if len(rest) > 0 {
		c.buf = c.srv.buffers.get(len(rest))
		copy(c.buf, rest)
		if !c.holds(len(c.buf)) {
			c.giveBack()
		}
	}
	scribble(read) // the next connection's
}

// hold keeps an operation for an errand, or for a goroutine.
func (s *seat) hold(t *task, why error) error {
	s.held = *t
	return why
}

// admits tells whether the operation can be carried out here and now: nil,
// errWaits or errLeaves.
func (s *seat) admits(c *client, t *task, now mono.Time) error {
	op := &t.op
	if op.Kind.Upgrade() || op.Kind == session.OpSub && c.srv.cfg.StrictBuffering {
		return s.hold(t, errLeaves)
	}
	if s.patient {
		return nil
	}
	switch {
	case op.Kind == session.OpAuth, op.Kind == session.OpSub:
		return s.hold(t, errWaits)
	case op.Kind.Publishes():
		if c.srv.cfg.Auth != nil && !now.Before(c.cred.expires) {
			return s.hold(t, errWaits)
		}
	}
	return nil
}

// lend gives the connection the buffer that it is being read in: the held
// operation refers to it.
func (l *loop) lend(c *client) {
	if &c.buf[0] == &l.buf[0] {
		l.buf = l.srv.buffers.get(loopBuffer)
	}
}

// sendAway has an errand carry out what may wait, and all that was read after
// it.
func (l *loop) sendAway(c *client) {
	s := c.seat
	l.lend(c)
	s.away, s.patient, s.parted = true, true, false
	s.back.Store(false)
	if err := l.watch(c); err != nil {
		s.away, s.patient = false, false
		l.fail(c, err)
		return
	}
	l.errand.Go(func() {
		t := s.held
		s.held = task{}
		now := clock.Mono()
		s.err = c.flushRow(now)
		if s.err == nil && t.op.Kind != session.OpNone {
			s.err = c.carryOut(&t, now)
		}
		if s.err == nil {
			s.err = c.consume()
		}
		s.patient = false
		s.back.Store(true)
		l.post(c)
	})
}

// leaves looks at the end of a peer whose connection is away. One that has only
// ended its own side may wait for what it is answered, as long as one that is
// told goodbye; after that, or if nothing can be written, the descriptor is closed
// and what the errand does is for nobody.
func (l *loop) leaves(c *client, events uint32) {
	s := c.seat
	switch {
	case s.lost:
	case events&(unix.EPOLLHUP|unix.EPOLLERR) != 0:
		l.abandon(c)
	case events&unix.EPOLLRDHUP != 0 && !s.parted:
		s.parted = true
		s.until = clock.Mono().Add(lingerTime)
		if s.place < 0 {
			s.at = s.until
			heap.Push(&l.due, c)
		} else if s.until.Before(s.at) {
			s.at = s.until
			heap.Fix(&l.due, s.place)
		}
		if l.watch(c) != nil {
			l.abandon(c)
		}
	}
}

// abandon closes the descriptor of a connection that is away. All else of it
// ends when the errand is back, which need not ask anybody any more.
func (l *loop) abandon(c *client) {
	s := c.seat
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
		c.logEnd(fmt.Errorf("close: %w", err))
	}
	c.severed.Store(true)
	if stop := c.asking.Load(); stop != nil {
		(*stop)()
	}
}

// returned goes on where the errand left off.
func (l *loop) returned(c *client) {
	s := c.seat
	s.away = false
	if c.severed.Load() {
		l.fail(c, net.ErrClosed)
		return
	}
	if err := l.watch(c); err != nil {
		l.fail(c, err)
		return
	}
	l.consumed(c, s.err)
	if s.phase == open {
		l.touch(c)
	}
}

// dismiss hands the connection to a goroutine, with the operation that it held
// and what it owes its peer.
func (l *loop) dismiss(c *client) {
	s := c.seat
	l.lend(c)
	owed := append(s.pending, c.sess.Output()...)
	c.sess.ClearOutput()
	held := s.held
	l.leaveSeat(c)
	f := os.NewFile(uintptr(s.fd), c.remote)
	nc, err := net.FileConn(f)
	f.Close()
	if err != nil {
		c.in.Release()
		c.giveBack()
		c.leaveTopics()
		c.logEnd(fmt.Errorf("hand over to a goroutine: %w", err))
		l.srv.left(c)
		return
	}
	if raw, ok := c.in.(*hook.Conn); ok {
		raw.Move(nc)
	}
	c.nc, c.out, c.seat = nc, nc, nil
	c.on.Store(nil)
	go func() {
		defer l.srv.left(c)
		c.end(c.goOn(owed, &held))
	}()
}

// flushAll writes what the turn has brought.
func (l *loop) flushAll() {
	for i := 0; i < len(l.dirty); i++ { // it may grow meanwhile
		c := l.dirty[i]
		s := c.seat
		if s == nil {
			continue
		}
		s.listed = false
		if s.away || s.phase != open {
			continue
		}
		if err := l.flush(c); err != nil {
			l.fail(c, err)
		} else if c.ended() {
			l.finish(c, c.cause(), true)
		}
	}
	clear(l.dirty)
	l.dirty = l.dirty[:0]
}

// flush writes replies, and messages if the connection subscribes.
func (l *loop) flush(c *client) error {
	s := c.seat
	replies := c.sess.Output()
	if len(s.pending) > 0 { // they line up
		s.pending = append(s.pending, replies...)
		c.sess.ClearOutput()
		return l.watch(c)
	}
	if c.sub == nil || !s.ready {
		if len(replies) == 0 {
			return nil
		}
		n, err := poll.Write(s.fd, replies)
		if err == nil && n < len(replies) {
			err = l.owe(c, replies[n:])
		}
		c.sess.ClearOutput()
		return err
	}
	for more := true; more && len(s.pending) == 0; {
		g := &l.going
		g.Reset()
		g.Frames = append(g.Frames, c.sess.Output()...)
		c.sess.ClearOutput()
		most := len(g.Frames) + loopGather
		if !c.sub.Take(g, most) {
			c.quitting.Store(true) // the channel is gone; the connection goes, too
		}
		more = len(g.Frames) >= most // else nothing is left: notify will tell
		if len(g.Frames) == 0 {
			break
		}
		work(g.Messages())
		n, err := poll.Write(s.fd, g.Frames)
		if err != nil {
			return err
		}
		if n < len(g.Frames) {
			s.owed, *g = *g, s.owed
			if err := l.owe(c, s.owed.Frames[n:]); err != nil {
				return err
			}
			s.owed.Frames = nil
			return nil // ready is still set
		}
		l.wrote(c, g)
		scribble(g.Frames)
	}
	if cap(l.going.Frames) > 2*loopGather {
		l.going.Frames = nil
	}
	s.ready = false
	return nil
}

// wrote records messages that are on the socket.
func (l *loop) wrote(c *client, g *broker.Outgoing) {
	if n := g.Messages(); n > 0 {
		c.sub.Wrote(g)
		add(&c.ledger.messages, n)
		if k := len(l.fed); k == 0 || l.fed[k-1] != c {
			l.fed = append(l.fed, c)
		}
	}
}

// owe keeps what the socket does not take now.
func (l *loop) owe(c *client, rest []byte) error {
	s := c.seat
	s.pending = append([]byte(nil), rest...)
	s.writeBy = clock.Mono().Add(l.srv.cfg.WriteTimeout)
	l.schedule(c)
	return l.watch(c)
}

// writable writes what is owed.
func (l *loop) writable(c *client) {
	s := c.seat
	n, err := poll.Write(s.fd, s.pending)
	if err != nil {
		l.fail(c, err)
		return
	}
	if n > 0 {
		s.writeBy = clock.Mono().Add(l.srv.cfg.WriteTimeout)
		s.pending = s.pending[n:]
	}
	if len(s.pending) == 0 {
		s.pending = nil
		if c.sub != nil {
			l.wrote(c, &s.owed)
		}
		s.owed = broker.Outgoing{}
		if s.phase == ending {
			l.parting(c)
			return
		}
		l.touch(c)
	}
	l.schedule(c)
	if err := l.watch(c); err != nil {
		l.fail(c, err)
	}
}

// finish ends a connection in order: what it is owed is written first; with
// linger the peer is then given time to read it.
func (l *loop) finish(c *client, err error, linger bool) {
	s := c.seat
	if s.phase != open {
		return
	}
	l.letGo(c)
	c.logEnd(err)
	c.giveBack()
	s.phase, s.linger = ending, linger
	if err := l.flush(c); err != nil {
		l.shut(c)
		return
	}
	if len(s.pending) == 0 {
		l.parting(c)
		return
	}
	if err := l.watch(c); err != nil {
		l.shut(c)
	}
}

// letGo gives back what the connection has in the broker.
func (l *loop) letGo(c *client) {
	if c.sub != nil {
		c.sub.Close()
		c.sub = nil
	}
	c.leaveTopics()
}

// parting follows the last write.
func (l *loop) parting(c *client) {
	s := c.seat
	if !s.linger || unix.Shutdown(s.fd, unix.SHUT_WR) != nil {
		l.shut(c)
		return
	}
	s.phase = lingering
	s.until = clock.Mono().Add(lingerTime)
	s.left = int64(math.MaxInt64)
	if closing, _ := c.sess.Closing(); closing {
		s.left = lingerBytes
	}
	l.schedule(c)
	if l.watch(c) != nil {
		l.shut(c)
	}
}

// discard reads what a peer still sends that was told goodbye.
func (l *loop) discard(c *client) {
	s := c.seat
	n, err := poll.Read(s.fd, l.buf)
	s.left -= int64(n)
	if err != nil || s.left <= 0 {
		l.shut(c)
	}
}

// fail ends a connection that is broken, or is to be cut.
func (l *loop) fail(c *client, err error) {
	if c.seat.phase == gone {
		return
	}
	sub := c.sub != nil
	l.letGo(c)
	if err = ignoreClosed(err); err != nil && sub {
		l.srv.log.Debug("subscriber lost", obs.KeyRemote, c.remote, obs.KeyError, err)
	} else {
		c.logEnd(err)
	}
	l.shut(c)
}

// shut closes the socket.
func (l *loop) shut(c *client) {
	s := c.seat
	c.in.Release()
	c.giveBack()
	l.leaveSeat(c)
	if !s.lost {
		if err := unix.Close(s.fd); err != nil {
			c.logEnd(fmt.Errorf("close: %w", err))
		}
	}
	l.srv.left(c)
}

// leaveSeat takes the connection off the loop.
func (l *loop) leaveSeat(c *client) {
	s := c.seat
	// It may never have been there, and the descriptor may live on.
	if s.events != 0 {
		_ = l.poller.Watch(s.fd, s.number, s.turn, s.events, 0)
		s.events = 0
	}
	s.phase = gone
	s.pending, s.owed = nil, broker.Outgoing{}
	l.seats[s.number] = nil
	l.vacant = append(l.vacant, s.number)
	if s.place >= 0 {
		heap.Remove(&l.due, s.place)
	}
}

// schedule sees to it that expire looks at the connection in time. A time that
// moves back is left as it is: looking is cheap.
func (l *loop) schedule(c *client) {
	s := c.seat
	at := s.deadline(c)
	switch {
	case s.place < 0 && at != mono.Never:
		s.at = at
		heap.Push(&l.due, c)
	case s.place >= 0 && at < s.at:
		s.at = at
		heap.Fix(&l.due, s.place)
	}
}

// deadline is when something is to be done about the connection.
func (s *seat) deadline(c *client) mono.Time {
	at := mono.Never
	switch s.phase {
	case open:
		at = c.sess.Deadline()
	case lingering:
		at = s.until
	}
	if len(s.pending) > 0 {
		at = min(at, s.writeBy)
	}
	return at
}

var errWriteTimeout = errors.New("the peer takes nothing")

// expire does what is due.
func (l *loop) expire(now mono.Time) {
	for len(l.due) > 0 && !now.Before(l.due[0].seat.at) {
		c := l.due[0]
		s := c.seat
		if s.away { // the session is the errand's: heartbeats wait, as all else does
			if s.parted && !s.lost && !now.Before(s.until) {
				l.abandon(c)
			}
			s.at = now.Add(lingerTime)
			heap.Fix(&l.due, s.place)
			continue
		}
		switch at := s.deadline(c); {
		case now.Before(at):
		case s.phase == lingering:
			l.shut(c)
			continue
		case len(s.pending) > 0 && !now.Before(s.writeBy):
			l.fail(c, errWriteTimeout)
			continue
		default:
			c.sess.Tick(now)
			l.touch(c)
		}
		if s.at = s.deadline(c); s.at == mono.Never {
			heap.Remove(&l.due, s.place)
		} else {
			heap.Fix(&l.due, s.place)
		}
	}
	l.flushAll()
}

// dueHeap orders connections by when something is to be done about them.
type dueHeap []*client

func (h dueHeap) next() mono.Time {
	if len(h) == 0 {
		return mono.Never
	}
	return h[0].seat.at
}

func (h dueHeap) Len() int           { return len(h) }
func (h dueHeap) Less(i, j int) bool { return h[i].seat.at < h[j].seat.at }
func (h dueHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].seat.place, h[j].seat.place = i, j
}

func (h *dueHeap) Push(x any) {
	c := x.(*client)
	c.seat.place = len(*h)
	*h = append(*h, c)
}

func (h *dueHeap) Pop() any {
	last := len(*h) - 1
	c := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	c.seat.place = -1
	return c
}
