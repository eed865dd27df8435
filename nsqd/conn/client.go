package conn

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/compress"
	"github.com/srtm-io/srtm/nsqd/queue"
)

// client is one connection: what all drivers share. A driver reads into buf,
// calls consume, writes the session's output and a subscriber's messages, and
// ends the client when ended says so. There are two: a goroutine (this file and
// writer.go), which may wait, and an event loop (loop_linux.go), which may not.
type client struct {
	// Set once.
	srv    *Server
	remote string // the peer's address

	// on is the loop that the connection is on; nil: a goroutine serves it, and
	// nc is set. A connection may leave a loop, and never comes to one.
	on atomic.Pointer[loop]
	nc net.Conn

	// Owned by the driver's reader.
	in        stream   // the socket, in the wrappings that were negotiated
	unpacking *patient // of them; nil without compression
	sess      *session.Session
	wall      mono.Wall // when what is being consumed was read
	deadline  mono.Time // of reads, as set on nc; 0: to be set
	buf       []byte    // buf[r:w] is read and not yet consumed
	r, w      int
	targets   []target // of publishes, each once; at most maxTargets, the last ones
	charge    charge   // of buf, in Server.room
	unsettled []unsettled
	stored    broker.Stored // of the last publish that its topic stored
	row       *row          // nil: no publishes wait to be handed over
	fins      *finRow       // nil: no FINs do
	sub       *broker.Subscription
	batch     wire.Batch  // the MPUB in hand: broker.Bodies, without an allocation
	cred      credentials // where clients need leave
	seat      *seat       // on a loop; nil: not

	// writeMu orders the writes of the reader (replies) and of the writer
	// (messages); held during a write, which WriteTimeout bounds. It guards
	// what they write through. Not used on a loop.
	writeMu sync.Mutex
	out     io.Writer       // nc, or TLS over it
	tls     *tls.Conn       // nil without TLS
	packer  compress.Packer // nil without compression
	packed  []byte          // scratch for it

	// writer, present once subscribed, but on a loop.
	wake    chan struct{} // 1 deep: deliveries are there, or the end
	writers sync.WaitGroup

	// Atomic: set once by Server or the writer, read by the reader at message
	// boundaries.
	stopping atomic.Bool                        // end, unless subscribed
	quitting atomic.Bool                        // end
	crowded  atomic.Bool                        // end for want of room; then quitting is set, too
	queued   atomic.Bool                        // in the inbox of a loop
	severed  atomic.Bool                        // to be cut by its loop
	asking   atomic.Pointer[context.CancelFunc] // ends what is asked for it; nil: nothing is

	ledger ledger // for display
}

// target is a topic that the connection publishes to: it saves the look-up, and
// counts as one of the topic's publishers.
type target struct {
	topic *broker.Topic
	as    *broker.Publisher // the connection, as one of the topic's publishers
	count *pubCount         // of the messages to it
}

// maxTargets bounds the topics that a connection keeps alive, and the search
// for one of them.
const maxTargets = 64

// Buffers are small while little comes, since most connections are idle
// sensors, and grow to what a client sends at once.
const (
	minBuffer = 512
	maxIdle   = 16 << 10 // a buffer larger than this is given back when empty
)

// Bounds of what a client may still send at its end.
const (
	lingerTime  = time.Second
	lingerBytes = 1 << 20 // if it was refused
)

// newClient returns a client that has no driver yet.
func newClient(s *Server, remote string) *client {
	return &client{
		srv: s, remote: remote,
		sess:   session.New(s.cfg.Session, clock.Mono()),
		ledger: ledger{connected: time.Now()},
	}
}

// run reads until the connection ends. It owns everything the connection has.
func (c *client) run() {
	c.in = c.srv.stamps.Track(c.nc)
	c.out = c.nc
	c.end(c.read())
}

// goOn is run for a connection that comes from a loop, which owed the peer some
// bytes and could not carry out t.
func (c *client) goOn(owed []byte, t *task) error {
	if len(owed) > 0 {
		c.writeMu.Lock()
		err := c.writeLocked(owed)
		c.writeMu.Unlock()
		if err != nil {
			return err
		}
	}
	if err := c.carryOut(t, clock.Mono()); err != nil {
		return err
	}
	return c.read()
}

// end ends a connection that a goroutine serves.
func (c *client) end(err error) {
	if c.sub != nil {
		c.sub.Close()
		c.notify()
		c.writers.Wait()
	}
	c.leaveTopics()
	c.giveBack()
	c.logEnd(err)
	c.goodbye()
	if c.ended() {
		c.linger()
	}
	c.in.Release()
	c.logEnd(ignoreClosed(c.nc.Close()))
}

// linger lets the peer read the last replies: closing a socket with unread
// input resets the connection, and the reset overtakes what was sent. A
// publisher that pipelines would take what was accepted as refused.
func (c *client) linger() {
	half, ok := c.nc.(interface{ CloseWrite() error }) // TCP, Unix sockets
	if !ok || half.CloseWrite() != nil {
		return
	}
	left := int64(math.MaxInt64)
	if closing, _ := c.sess.Closing(); closing {
		left = lingerBytes
	}
	for until := time.Now().Add(lingerTime); left > 0 && time.Now().Before(until); {
		if c.nc.SetReadDeadline(until) != nil {
			return
		}
		n, err := io.CopyN(io.Discard, c.nc, left)
		if !errors.Is(err, os.ErrDeadlineExceeded) { // else it may be an interrupt's
			return
		}
		left -= n
	}
}

func (c *client) logEnd(err error) {
	var fault *wire.Error
	switch {
	case errors.As(err, &fault):
		c.srv.faults.Add(1)
		c.srv.log.Warn("connection closed", obs.KeyRemote, c.remote, obs.KeyReason, fault.Code, obs.KeyError, err)
	case err != nil:
		c.srv.log.Debug("connection ended", obs.KeyRemote, c.remote, obs.KeyError, err)
	}
}

// stop ends the connection at a message boundary, unless it subscribes.
func (c *client) stop() {
	c.stopping.Store(true)
	c.interrupt()
}

// quit ends the connection at a message boundary, subscriber or not.
func (c *client) quit() {
	c.quitting.Store(true)
	c.interrupt()
}

// interrupt has the driver look whether the connection is to end. A reader that
// waits for bytes is woken by a deadline in the past.
func (c *client) interrupt() {
	if l := c.on.Load(); l != nil {
		l.post(c)
		return
	}
	_ = c.nc.SetReadDeadline(time.Unix(1, 0))
}

// cut ends the connection without regard to anything.
func (c *client) cut() {
	if l := c.on.Load(); l != nil {
		l.sever(c)
		return
	}
	c.nc.Close()
}

// read is the reader's loop; nil means an orderly end.
func (c *client) read() error {
	for {
		if err := c.consume(); err != nil {
			return err
		}
		if c.ended() {
			cause := c.cause()
			if err := c.reply(); err != nil {
				return err
			}
			return cause
		}
		if err := c.setDeadline(); err != nil {
			return err
		}
		if !c.makeRoom() {
			continue
		}
		n, err := c.in.Read(c.buf[c.w:])
		c.w += n
		if p := c.unpacking; p != nil {
			// Less than what a read has at 8 MB/s: nobody has to end it.
			time.Sleep(p.pace.take(clock.Mono(), n, p.came))
			p.came = 0
		}
		switch {
		case err == nil, errors.Is(err, errEnded):
		case errors.Is(err, os.ErrDeadlineExceeded):
			if err := c.idle(); err != nil {
				return err
			}
		case isEnd(err):
			return nil
		default:
			return c.readFault(err)
		}
	}
}

// isEnd reports whether a read's error is the stream's end. Wrapped streams
// rarely end where they should: clients just close.
func isEnd(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed)
}

// readFault tells a failure of the network from damage in what was sent.
func (c *client) readFault(err error) error {
	switch {
	case c.unpacking == nil:
		return fmt.Errorf("read: %w", err)
	case c.unpacking.err == nil:
		return wire.Wrap(wire.CodeInvalid, "the compressed stream is damaged", err)
	case errors.Is(c.unpacking.err, io.EOF), errors.Is(c.unpacking.err, net.ErrClosed):
		return nil // some decompressors call it damage
	}
	return fmt.Errorf("read: %w", c.unpacking.err)
}

// ended reports whether nothing more is to be read.
func (c *client) ended() bool {
	closing, _ := c.sess.Closing()
	return closing || c.quitting.Load() || c.stopping.Load() && c.sub == nil
}

// idle does what is due when a read's deadline has passed.
func (c *client) idle() error {
	c.sess.Tick(clock.Mono())
	c.deadline = 0
	return c.reply()
}

// setDeadline makes the next read end when the session wants a Tick.
func (c *client) setDeadline() error {
	d := c.sess.Deadline()
	if d == c.deadline {
		return nil
	}
	c.deadline = d
	t := time.Time{}
	if d != mono.Never {
		t = time.Now().Add(d.Sub(clock.Mono()))
	}
	if err := c.nc.SetReadDeadline(t); err != nil {
		return fmt.Errorf("read deadline: %w", err)
	}
	if c.ended() { // stop or quit came between: their deadline must not be lost
		c.interrupt()
	}
	return nil
}

// makeRoom makes space behind w. The buffer grows by doubling as bytes come,
// never ahead of them: a size that a client only announces costs no memory. It
// reports false if there may be none; then the connection is to end.
func (c *client) makeRoom() bool {
	unread := c.w - c.r
	if unread == 0 {
		c.r, c.w = 0, 0
		if len(c.buf) > maxIdle {
			c.giveBack()
		}
	}
	need := max(c.sess.Need(), unread+1)
	if c.r+need <= len(c.buf) {
		return true
	}
	if c.r > 0 {
		copy(c.buf, c.buf[c.r:c.w])
		c.r, c.w = 0, unread
	}
	if c.w == len(c.buf) {
		most := max(need, maxIdle)
		if wire.PeekVerb(c.buf[:c.w]) == wire.VerbMpub { // which says message by message what it needs
			most = max(most, c.srv.cfg.Session.Limits.MaxCommandSize())
		}
		return c.grow(min(2*len(c.buf), most))
	}
	return true
}

// grow moves what is unread to a buffer of that size or more. Requires: the old
// one is the connection's own, and nothing else refers to it. It reports false, and
// does nothing, if there may be none.
func (c *client) grow(size int) bool {
	buf := c.srv.buffers.get(size)
	if !c.holds(len(buf)) {
		c.srv.buffers.put(buf)
		return false
	}
	n := copy(buf, c.buf[c.r:c.w])
	c.srv.buffers.put(c.buf)
	c.buf, c.r, c.w = buf, 0, n
	return true
}

// giveBack empties the buffer, and gives it back. Requires as for grow.
func (c *client) giveBack() {
	c.srv.buffers.put(c.buf)
	c.buf, c.r, c.w = nil, 0, 0
	c.holds(0)
}

// What consume returns on a loop, with the operation in seat.held.
var (
	errWaits  = errors.New("the operation has to wait")
	errLeaves = errors.New("the connection needs a goroutine from here on")
)

// task is an operation to be carried out.
type task struct {
	op      session.Op
	n       int           // bytes of the command
	arrival stamp.Arrival // of a publish; Source counts once it is stamped
	stamped bool
}

// consume handles every whole command in the buffer, then writes the replies.
// On a loop it leaves off before what the loop may not do: errWaits, errLeaves.
func (c *client) consume() error {
	now := clock.Mono()
	c.wall = clock.Wall()
	filled := c.w == len(c.buf)
	var t task
	for {
		t.n, t.stamped = c.sess.StepInto(c.buf[c.r:c.w], now, &t.op), false
		if t.n == 0 && t.op.Kind == session.OpNone {
			break
		}
		if err := c.carryOut(&t, now); err != nil {
			return err
		}
		if closing, _ := c.sess.Closing(); closing {
			break
		}
	}
	if err := c.flushRow(now); err != nil {
		return c.seat.hold(&task{}, err) // only on a loop
	}
	c.flushFins(now)
	c.settle()
	// A client that fills its buffer sends more than the buffer was made for.
	if filled && c.r == c.w && len(c.buf) < maxIdle {
		c.grow(2 * len(c.buf))
	}
	return c.reply()
}

// carryOut does what a command asks for, and consumes it. An error other than
// those of consume ends the connection.
func (c *client) carryOut(t *task, now mono.Time) error {
	if t.op.Kind != session.OpFin {
		c.flushFins(now)
	}
	if c.seat != nil {
		if err := c.seat.admits(c, t, now); err != nil {
			return err
		}
	}
	joined, err := c.joins(t, now)
	if joined {
		return nil
	}
	if err == nil {
		err = c.flushRow(now)
	}
	if err != nil {
		return c.seat.hold(t, err) // only on a loop
	}
	op := &t.op
	switch {
	case op.Kind.Upgrade():
		c.settle()
		if err := c.reply(); err != nil {
			return err
		}
		c.sess.Answer(op, c.upgrade(*op))
	case op.Kind.Publishes():
		topic, err := c.publish(t, now)
		if errors.Is(err, broker.ErrBusy) { // only on a loop
			return c.seat.hold(t, errWaits)
		}
		c.published(op, topic, err)
	case op.Kind == session.OpFin:
		c.settle()
		c.finish(op.ID, now)
	case op.Kind != session.OpNone:
		c.settle()
		err := c.do(op, now)
		c.sess.Answer(op, err)
	}
	c.r += t.n
	if op.Kind == session.OpSub && c.sub != nil && c.seat == nil {
		// The reply to SUB goes out before the first message can.
		if err := c.reply(); err != nil {
			return err
		}
		c.writers.Go(c.newWriter().run)
	}
	return nil
}

// unsettled is a publish that is not answered yet: it, or one before it, has to
// be durable first.
type unsettled struct {
	kind  session.OpKind
	topic *broker.Topic // where err is nil
	at    broker.Stored // likewise
	err   error
}

// published answers a publish: at once, unless the topic keeps its messages on
// disk; then together with those behind it, so that they share one fsync.
func (c *client) published(op *session.Op, t *broker.Topic, err error) {
	if len(c.unsettled) == 0 && (err != nil || !t.Durable()) {
		c.sess.Answer(op, err)
		return
	}
	c.unsettled = append(c.unsettled, unsettled{kind: op.Kind, topic: t, at: c.stored, err: err})
}

// settle makes the publishes durable that wait for it, and answers them.
func (c *client) settle() {
	if len(c.unsettled) == 0 {
		return
	}
	for _, u := range c.unsettled {
		if u.err == nil && u.topic.Durable() {
			u.err = refusal([]byte(u.topic.Name()), u.topic.Sync(u.at)) // the first has the others' fsync done, too
		}
		c.sess.Done(session.Op{Kind: u.kind}, u.err)
	}
	clear(c.unsettled)
	c.unsettled = c.unsettled[:0]
}

// do acts on the broker.
func (c *client) do(op *session.Op, now mono.Time) error {
	switch op.Kind {
	case session.OpIdentify:
		id := c.sess.Identity()
		c.ledger.identity.Store(&id)
		for _, to := range c.targets {
			to.as.Rename(id.ClientID)
		}
		return nil
	case session.OpAuth:
		return c.authenticate(op)
	case session.OpSub:
		return c.subscribe(op, now)
	case session.OpRdy:
		return c.ready(op.Ready)
	case session.OpReq:
		err := c.sub.Requeue(op.ID, op.Timeout)
		if err == nil {
			add(&c.ledger.requeued, 1)
		}
		return err
	case session.OpTouch:
		return c.sub.Touch(op.ID)
	case session.OpCls:
		c.ledger.state.Store(int32(StateClosing))
		return c.ready(0)
	}
	return nil
}

// ready sets RDY. That the subscription has ended meanwhile, with its topic or
// channel, is no fault of the client's; the writer ends the connection for it.
func (c *client) ready(n int) error {
	if err := c.sub.Ready(n); !errors.Is(err, broker.ErrGone) {
		return err
	}
	return nil
}

// publish hands a message, or a batch, to its topic, which it returns.
func (c *client) publish(t *task, now mono.Time) (*broker.Topic, error) {
	op := &t.op
	if err := c.permit(op, now); err != nil {
		return nil, err
	}
	p := broker.Published{Body: op.Body, Arrival: c.arrival(t), Defer: op.Defer, Stored: &c.stored, NoWait: c.hurries()}
	if op.Kind == session.OpMpub {
		c.batch = op.Batch
		t, err := c.hand(op.Topic, p, &c.batch, now)
		c.batch = wire.Batch{}
		return t, err
	}
	return c.hand(op.Topic, p, nil, now)
}

// arrival returns when the command came, asking once. Requires: it is at buf[r].
func (c *client) arrival(t *task) stamp.Arrival {
	if t.stamped {
		return t.arrival
	}
	if c.seat != nil && !c.seat.lock() {
		return stamp.Arrival{At: clock.Mono(), Source: stamp.Read}
	}
	start := c.in.Offset() - int64(c.w-c.r)
	t.arrival, t.stamped = c.in.Arrival(start, start+int64(t.n)), true
	if c.seat != nil {
		c.seat.unlock()
	}
	return t.arrival
}

// publishTo finds the topic, at best without a look-up. What it returns holds
// until the next call.
func (c *client) publishTo(name []byte) (*target, error) {
	if to := c.target(name); to != nil {
		return to, nil
	}
	find := c.srv.broker.TopicForClient
	if c.hurries() {
		find = c.srv.broker.Topic // others may have to be asked before it is created
	}
	t, err := find(name)
	switch {
	case err != nil && c.hurries():
		return nil, broker.ErrBusy
	case err != nil:
		return nil, refusal(name, err)
	}
	if len(c.targets) == maxTargets {
		c.leaveTopic(c.targets[0].topic)
	}
	c.targets = append(c.targets, target{t, t.AddPublisher(c.sess.Identity().ClientID), c.ledger.counter(t.Name())})
	return &c.targets[len(c.targets)-1], nil
}

// target returns the topic of that name that the connection has published to;
// nil if it has not.
func (c *client) target(name []byte) *target {
	for i := range c.targets {
		if to := &c.targets[i]; to.topic.Name() == string(name) {
			return to
		}
	}
	return nil
}

func (c *client) leaveTopic(t *broker.Topic) {
	c.targets = slices.DeleteFunc(c.targets, func(is target) bool {
		if is.topic == t {
			is.as.Leave()
		}
		return is.topic == t
	})
}

// leaveTopics leaves all of them.
func (c *client) leaveTopics() {
	for _, is := range c.targets {
		is.as.Leave()
	}
	c.targets = nil
}

// refusal gives a broker's refusal its words on the wire. Those that pass are
// not fatal: the publisher keeps its connection and may try again.
func refusal(topic []byte, err error) error {
	var over *queue.OverLimitError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &over):
		return wire.RateLimited(over.Delay - over.Limit)
	case errors.Is(err, queue.ErrFull):
		return wire.Wrap(wire.CodeQueueFull, fmt.Sprintf("topic %q is full", topic), err)
	case errors.Is(err, broker.ErrStorage):
		return wire.Wrap(wire.CodeQueueFull, fmt.Sprintf("topic %q cannot be stored now", topic), err)
	case errors.Is(err, broker.ErrUnknownTopic):
		return wire.Wrap(wire.CodeBadTopic, fmt.Sprintf("topic %q is not on this broker: ask the loaddistributor where it is", topic), err)
	case errors.Is(err, broker.ErrTooManyConsumers):
		return wire.Wrap(wire.CodeSubFailed, "SUB failed, the channel has as many consumers as it may", err)
	case errors.Is(err, broker.ErrTooManyChannels):
		return wire.Wrap(wire.CodeSubFailed, "SUB failed, there are as many channels as there may be", err)
	case errors.Is(err, broker.ErrTooManyTopics):
		return wire.Wrap(wire.CodePubFailed, "PUB failed, there are as many topics as there may be", err)
	case errors.Is(err, broker.ErrBadName):
		return wire.Wrap(wire.CodeBadTopic, fmt.Sprintf("topic %q is not a valid name", topic), err)
	}
	return err
}

func (c *client) subscribe(op *session.Op, now mono.Time) error {
	if err := c.permit(op, now); err != nil {
		return err
	}
	id := c.sess.Identity()
	about := broker.Subscriber{
		MsgTimeout: id.MsgTimeout,
		SampleRate: id.SampleRate,
		Distance:   c.srv.cfg.distance(id.Region, id.Zone),
	}
	notify := c.notify
	if c.seat != nil {
		notify = c.interrupt
	} else {
		c.wake = make(chan struct{}, 1)
	}
	var sub *broker.Subscription
	for sub == nil {
		t, err := c.srv.broker.TopicForClient(op.Topic)
		if errors.Is(err, broker.ErrTooManyTopics) {
			return wire.Wrap(wire.CodeSubFailed, "SUB failed, there are as many topics as there may be", err)
		}
		if err != nil {
			return refusal(op.Topic, err)
		}
		sub, err = t.Subscribe(string(op.Channel), about, notify)
		if err != nil && !errors.Is(err, broker.ErrGone) { // deleted since it was looked up
			return refusal(op.Topic, err)
		}
	}
	c.sub = sub
	c.ledger.sub.Store(&subscribed{sub, string(op.Topic), string(op.Channel)})
	c.ledger.state.Store(int32(StateSubscribed))
	c.in.Ignore() // from now on commands come that nobody needs the times of
	c.remember()
	return nil
}

// notify wakes the writer. It never blocks: one wake-up covers all.
func (c *client) notify() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// hurries reports whether the connection is on a loop, for which nothing may
// wait now.
func (c *client) hurries() bool { return c.seat != nil && !c.seat.patient }

// reply writes the session's output. The reader calls it. A loop writes by
// itself, when it has read what there is.
func (c *client) reply() error {
	out := c.sess.Output()
	if len(out) == 0 || c.seat != nil {
		return nil
	}
	c.writeMu.Lock()
	err := c.writeLocked(out)
	c.writeMu.Unlock()
	c.sess.ClearOutput()
	return err
}

// writeLocked writes all of b. Requires: writeMu held.
func (c *client) writeLocked(b []byte) error {
	if err := c.nc.SetWriteDeadline(time.Now().Add(c.srv.cfg.WriteTimeout)); err != nil {
		return fmt.Errorf("write deadline: %w", err)
	}
	if c.packer != nil {
		c.packed = c.packer.Append(c.packed[:0], b)
		b = c.packed
		if cap(b) > keepOut {
			c.packed = nil
		}
	}
	if _, err := c.out.Write(b); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	return nil
}

// ignoreClosed drops the error of an operation on a connection that this side
// closed on purpose.
func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}
