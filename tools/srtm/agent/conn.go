package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/client/pool"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
)

// writeTimeout limits a write to a producer that does not read.
const writeTimeout = 10 * time.Second

// lingerTime limits the wait for a producer to close its side.
const lingerTime = time.Second

// conn is one producer's connection. A publish passes through three goroutines, in order:
// the reader takes commands from the socket and sends them to the brokers, await collects
// the answers, and the writer answers the producer and sends heartbeats.
type conn struct {
	// set once
	a       *Agent
	nc      net.Conn
	started chan *order // reader -> await
	done    chan *order // await -> writer

	// Atomic: set by stop, read by the reader.
	stopped atomic.Bool
	// Atomic: set by the reader while it waits for room; read by the writer, which must
	// not treat the producer as silent meanwhile.
	stalled atomic.Bool
	// Atomic: set by the writer when the producer is gone or finally refused. Publishes
	// that are not yet sent are then dropped: a broker would accept them without an
	// answer to the producer.
	ended atomic.Bool

	// Owned by the reader.
	line    *pool.Line
	room    int64       // bytes of a.receiving
	timeout *time.Timer // ends the connection if a large command does not arrive in time; nil without a large command

	mu struct {
		sync.Mutex
		session *session.Session
	}
}

// order is a command in progress.
type order struct {
	op  session.Op // message data, valid until submit has handed op on
	key pool.Key

	// Set by the reader, then by await.
	cancel  context.CancelFunc
	pending pool.Pending
	begins  bool // pending is set
	err     error

	settled chan struct{} // closed by the writer; nil for publishes
}

func newConn(a *Agent, nc net.Conn) *conn {
	c := &conn{
		a: a, nc: nc, line: a.publishers.Line(),
		started: make(chan *order, a.cfg.MaxOutstanding),
		done:    make(chan *order),
	}
	c.mu.session = session.New(&a.protocol, clock.Mono())
	return c
}

// run serves the connection to its end. Publishes are bounded by base.
func (c *conn) run(base context.Context) {
	log := c.a.log.With(obs.KeyRemote, c.nc.RemoteAddr().String())
	var all sync.WaitGroup
	all.Go(c.await)
	all.Go(c.write)
	err := c.read(base)
	close(c.started)
	all.Wait()
	if _, cause := c.closing(); err == nil {
		err = cause
	}
	c.linger()
	_ = c.nc.Close() // the connection is over in any case
	c.line.Close()
	var fault *wire.Error
	switch {
	case errors.Is(err, session.ErrClosedUnsubscribed): // a producer's way to close
	case errors.As(err, &fault):
		log.Warn("producer refused", obs.KeyError, err)
	case err != nil:
		log.Info("producer lost", obs.KeyError, err)
	}
}

func (c *conn) stop() {
	c.stopped.Store(true)
	_ = c.nc.SetReadDeadline(time.Unix(1, 0)) // fails only when closed
}

// linger half-closes the connection and waits until the producer has read its last
// answers. An immediate close could reset the connection before that.
func (c *conn) linger() {
	half, ok := c.nc.(interface{ CloseWrite() error })
	if !ok || half.CloseWrite() != nil {
		return
	}
	if c.nc.SetReadDeadline(time.Now().Add(lingerTime)) == nil {
		_, _ = io.Copy(io.Discard, c.nc) // unread commands were not acknowledged
	}
}

// read takes commands until the connection ends; nil means an orderly end.
func (c *conn) read(base context.Context) error {
	var buf []byte
	chunk := make([]byte, chunkSize)
	defer c.leaveRoom()
	for {
		n, o, ended := c.step(buf)
		switch {
		case ended:
			c.started <- &order{} // makes the writer send the last answers
			return nil
		case o != nil:
			c.submit(base, o)
		}
		if buf = buf[n:]; n > 0 {
			if c.leaveRoom() {
				buf = bytes.Clone(buf) // release the memory of a large publish
			}
			continue
		}
		if c.stopped.Load() {
			return nil
		}
		if err := c.makeRoom(base, buf); err != nil {
			return nil // the agent stops
		}
		n, err := c.nc.Read(chunk)
		buf = append(buf, chunk[:n]...)
		switch {
		case n > 0 || err == nil:
		case errors.Is(err, os.ErrDeadlineExceeded): // stop and the writer end the read in this way
		case errors.Is(err, io.EOF), errors.Is(err, net.ErrClosed):
			return nil
		default:
			return fmt.Errorf("read: %w", err)
		}
	}
}

// chunkSize is the maximum size of one read, in bytes. Incomplete commands larger than
// chunkSize count towards Config.MaxBuffer.
const chunkSize = 16 << 10

// errLate: a producer did not finish a large command in time.
var errLate = wire.NewError(wire.CodePubFailed, "not accepted: it did not come whole in time")

// makeRoom waits until the rest of the command that begins with buf may be read. A large
// command gets room for its full size at once, so that commands with partial room never
// wait for each other. If a large command does not arrive in time, the session refuses
// it.
func (c *conn) makeRoom(base context.Context, buf []byte) error {
	c.mu.Lock()
	need := max(c.mu.session.Need(), len(buf)+1)
	c.mu.Unlock()
	if need <= chunkSize || c.room > 0 {
		return nil
	}
	if wire.PeekVerb(buf) == wire.VerbMpub { // MPUB announces the size of each message separately
		need = c.a.protocol.Limits.MaxCommandSize()
	}
	c.stalled.Store(true)
	defer c.stalled.Store(false)
	room := min(int64(need), c.a.cfg.MaxBuffer)
	if err := c.a.receiving.Acquire(base, room); err != nil {
		return err
	}
	c.room = room
	c.timeout = time.AfterFunc(c.a.cfg.PublishTimeout, func() {
		c.mu.Lock()
		c.mu.session.Refuse(errLate)
		c.mu.Unlock()
		c.stop()
	})
	return nil
}

// leaveRoom releases the room of makeRoom and reports whether there was any.
func (c *conn) leaveRoom() bool {
	if c.room == 0 {
		return false
	}
	c.timeout.Stop()
	c.a.receiving.Release(c.room)
	c.room = 0
	return true
}

// bare returns a command without its message data.
func bare(op session.Op) session.Op {
	return session.Op{Kind: op.Kind, ID: op.ID, Defer: op.Defer}
}

// step consumes one command of buf; a publish refers to buf. over means that the session
// takes no more commands.
func (c *conn) step(buf []byte) (n int, o *order, ended bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.mu.session
	n, op := s.Step(buf, clock.Mono())
	if closing, _ := s.Closing(); closing || n == 0 && s.Need() == 0 {
		return n, nil, true // a refusal may have to wait for answers
	}
	if op.Kind == session.OpNone {
		return n, nil, false
	}
	if !op.Kind.Publishes() {
		return n, &order{op: bare(op), settled: make(chan struct{})}, false
	}
	o = &order{op: op, key: pool.Key{Topic: string(op.Topic), ID: c.a.cfg.PublisherID}}
	if o.key.ID == "" {
		o.key.ID = s.Identity().ClientID
	}
	return n, o, false
}

// submit sends a publish to its broker when there is room, and hands the order to await.
// For other commands submit waits until the writer has answered, because the answer
// changes the meaning of the next command.
func (c *conn) submit(base context.Context, o *order) {
	if c.timeout != nil {
		c.timeout.Stop()
	}
	c.stalled.Store(true)
	defer c.stalled.Store(false)
	if o.op.Kind.Publishes() {
		c.begin(base, o)
	}
	o.op = bare(o.op)
	c.started <- o
	if o.settled != nil {
		<-o.settled
	}
}

// errOver: the connection ended before the publish was sent.
var errOver = errors.New("not sent: the connection is over")

// errNameless: neither the producer nor the configuration says who publishes.
var errNameless = errors.New("not sent: no client_id in IDENTIFY, and no publisher id is configured")

func (c *conn) begin(base context.Context, o *order) {
	switch {
	case c.ended.Load():
		o.err = errOver
		return
	case o.key.ID == "":
		o.err = errNameless
		return
	}
	var ctx context.Context
	ctx, o.cancel = context.WithTimeout(base, c.a.cfg.PublishTimeout)
	m := pool.Message{Body: o.op.Body, Defer: o.op.Defer}
	if o.op.Kind == session.OpMpub {
		m.Batch = &o.op.Batch
	}
	o.pending, o.begins = c.line.Begin(ctx, o.key, m), true
}

// await takes the brokers' answers.
func (c *conn) await() {
	defer close(c.done)
	for o := range c.started {
		if o.begins {
			o.err = o.pending.Wait()
		}
		if o.cancel != nil {
			o.cancel()
		}
		c.done <- o
	}
}

// write answers, and sends heartbeats.
func (c *conn) write() {
	heartbeat := time.NewTimer(time.Hour)
	defer heartbeat.Stop()
	for {
		if d := c.deadline(); d == mono.Never {
			heartbeat.Stop()
		} else {
			heartbeat.Reset(max(0, d.Sub(clock.Mono())))
		}
		select {
		case o, more := <-c.done:
			if !more {
				return
			}
			c.settle(o)
		case <-heartbeat.C:
			c.tick()
		}
		c.flush()
	}
}

func (c *conn) settle(o *order) {
	err := o.err
	switch {
	case o.op.Kind.Publishes():
		err = c.verdict(o)
	case o.op.Kind != session.OpNone && o.op.Kind != session.OpIdentify:
		err = wire.NewError(wire.CodeInvalid, o.op.Kind.String()+" to an agent, which takes publishes only")
	}
	if o.op.Kind != session.OpNone {
		c.mu.Lock()
		c.mu.session.Done(o.op, err)
		c.mu.Unlock()
	}
	if o.settled != nil {
		close(o.settled)
	}
}

// failed maps each publish command to its error code.
var failed = map[session.OpKind]wire.ErrorCode{
	session.OpPub: wire.CodePubFailed, session.OpMpub: wire.CodeMpubFailed, session.OpDpub: wire.CodeDpubFailed,
}

// verdict counts a publish and returns the producer's answer.
func (c *conn) verdict(o *order) error {
	result := pool.Result(o.err)
	c.a.publishes.WithLabelValues(result).Inc()
	if result == pool.Unsent && !c.ended.Load() {
		c.a.log.Warn("publish failed", obs.KeyTopic, o.key.Topic, obs.KeyPublisher, o.key.ID, obs.KeyError, o.err)
	}
	if errors.Is(o.err, errNameless) {
		return wire.Wrap(failed[o.op.Kind], "not accepted: "+errNameless.Error(), o.err)
	}
	return pool.Verdict(failed[o.op.Kind], o.err)
}

func (c *conn) deadline() mono.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.session.Deadline()
}

// tick adds a heartbeat to the output if one is due. While the reader is stalled, the
// producer does not count as silent.
func (c *conn) tick() {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := clock.Mono()
	if c.stalled.Load() {
		c.mu.session.Heard(now)
	}
	c.mu.session.Tick(now)
}

func (c *conn) closing() (bool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.session.Closing()
}

func (c *conn) flush() {
	c.mu.Lock()
	out := append([]byte(nil), c.mu.session.Output()...)
	c.mu.session.ClearOutput()
	closing, _ := c.mu.session.Closing()
	c.mu.Unlock()
	if c.ended.Load() {
		return
	}
	err := c.nc.SetWriteDeadline(time.Now().Add(writeTimeout))
	if err == nil && len(out) > 0 {
		_, err = c.nc.Write(out)
	}
	if err != nil || closing {
		c.ended.Store(true)
		c.stop()
	}
}
