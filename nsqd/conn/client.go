package conn

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/kernel/stamp"
	mqttsession "github.com/srtm-io/srtm/mqtt/session"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/mqtt"
)

// client is one connection, independent of its driver. The driver reads into buf, calls consume,
// writes the session's output and a subscriber's messages, and ends the client once ended returns
// true.
type client struct {
	// Set once.
	env    *env
	remote string // the peer's address

	// signals and driver change at most once: to a goroutine, when the connection leaves its loop. The
	// reader writes both.
	signals atomic.Pointer[signals]

	// Owned by the driver's reader.
	driver     driver
	in         stream // the socket with its negotiated layers
	sess       protocol
	peer       peer         // of sess
	mqtt       *mqtt.Client // sess; nil: NSQ
	awaitsTLS  bool         // the handshake reads the next bytes
	wall       mono.Wall    // time of the last read
	buf        []byte       // buf[r:w] is read and not yet consumed
	r, w       int
	turn       int          // commands of the current consume that no batch carried out
	paused     bool         // consume has stopped at maxTurn
	charge     memoryCharge // buf's share of env.memory
	cred       credentials
	sub        subscription   // nil: the client does not subscribe
	deliveries deliveries     // of sub
	encoder    broker.Encoder // of deliveries; nil: NSQ frames; set before sub
	commands   commands       // of sub; nil: MQTT
	fins       *finBatch      // nil: no FINs wait to be handed over
	pubs       publisher
	unhold     func() // releases Config.Hold; nil: not held

	// Atomic. Written by Server, the memory budget or the writer. The reader checks them at message
	// boundaries.
	stopping      atomic.Bool                        // end, unless subscribed
	quitting      atomic.Bool                        // end
	memoryShort   atomic.Bool                        // end because memory is short; quitting is set, too
	severed       atomic.Bool                        // end at once
	cancelRequest atomic.Pointer[context.CancelFunc] // cancels the request in progress to another process; nil: no request

	// Guarded by env.clients.mu.
	registration

	stats connStats // for display
}

// protocol is a client's session. It turns bytes into operations, and outcomes into replies:
// nsq/session.Session.
type protocol interface {
	StepInto(in []byte, now mono.Time, op *session.Op) (n int)
	Answer(op *session.Op, err error)
	Output() []byte
	ClearOutput()
	Closing() (closing bool, cause error)
	Deadline() mono.Time
	Tick(now mono.Time)
}

// peer is what a session knows about its client.
type peer interface {
	Need() int
	LastCommand() mono.Time
	Identity() session.Identity
	Restricted() bool
	Refuse(e *wire.Error)
}

// subscription is what a client has subscribed to: a broker.Subscription, a forward.Subscription if the
// topic is on other brokers, or mqtt.Sources. No method blocks.
type subscription interface {
	FinishBatch(now mono.Time, batch []wire.MessageID, errs []error) []error
	Close()
}

// commands are a consumer's commands that only NSQ has. The same types implement it. No method blocks.
type commands interface {
	Ready(n int) error
	Requeue(id wire.MessageID, delay time.Duration) error
	Touch(id wire.MessageID) error
}

// consumer is a subscription of a topic and a channel. All fields are the same.
type consumer struct {
	subscription
	commands
	deliveries
}

// deliveries are the messages of a subscription. The same types implement it. No method blocks.
type deliveries interface {
	Take(out *broker.Outgoing, limit int) (open bool)
	Wrote(out *broker.Outgoing)
	Holds() (ready, inFlight int)
}

// signals of other goroutines to a driver. No method blocks.
type signals interface {
	interrupt() // check whether the connection is to end
	cut()       // close the connection
	notify()    // the subscription has messages, or has ended
}

// driver serves a connection: a goroutine, which may block, or an event loop, which may not. The
// reader calls it.
type driver interface {
	// nonblocking reports whether the current operation must not block.
	nonblocking() bool
	// admits returns carriedOut if the driver can carry out op now.
	admits(op *session.Op, now mono.Time) verdict
	// upgrade wraps the stream. Requires: the output is written, the buffer is empty.
	upgrade(op session.Op) error
	// subscribed follows the answer to SUB. Arrival times of later commands are not needed.
	subscribed() error
	// reply writes the session's output, now or later.
	reply() error
	// arrival returns when the bytes [start, end) of the stream arrived.
	arrival(start, end int64) stamp.Arrival
}

// newClient returns a client that has no driver yet.
func newClient(e *env, remote string, p Protocol) *client {
	if p != NSQ {
		return newMQTTClient(e, remote, p == MQTTS)
	}
	s := session.New(e.cfg.Session, clock.Mono())
	return &client{env: e, remote: remote, sess: s, peer: s, stats: connStats{connected: time.Now()}}
}

// setDriver sets the client's driver, with the signals of the same driver.
func (c *client) setDriver(d driver, s signals) {
	c.driver = d
	c.signals.Store(&s)
}

// notifier returns the function by which a new subscription notifies the driver.
func (c *client) notifier() func() { return (*c.signals.Load()).notify }

// stop ends the connection at a message boundary, unless it subscribes.
func (c *client) stop() {
	c.stopping.Store(true)
	(*c.signals.Load()).interrupt()
}

// quit ends the connection at a message boundary, subscriber or not.
func (c *client) quit() {
	c.quitting.Store(true)
	(*c.signals.Load()).interrupt()
}

// cut ends the connection at once.
func (c *client) cut() {
	c.abort()
	(*c.signals.Load()).cut()
}

// interruptibly runs do, which waits for other processes, until abort or Shutdown cancels it.
func (c *client) interruptibly(do func(context.Context) error) error {
	ctx, stop := context.WithCancel(c.env.ctx)
	defer stop()
	c.cancelRequest.Store(&stop)
	defer c.cancelRequest.Store(nil)
	if c.severed.Load() {
		stop()
	}
	return do(ctx)
}

// abort cancels the current request to another process and all later requests.
func (c *client) abort() {
	c.severed.Store(true)
	if stop := c.cancelRequest.Load(); stop != nil {
		(*stop)()
	}
}

// lingerUntil returns when a connection that ends in order at now stops lingering. The peer has
// lingerTime to read the replies to its last commands. If the peer has sent no command for
// lingerTime, the connection does not linger.
func (c *client) lingerUntil(now mono.Time) mono.Time {
	return min(now, c.peer.LastCommand()).Add(lingerTime)
}

// release releases the connection's subscription, publishers and forwarded publishes.
func (c *client) release() {
	if c.unhold != nil {
		c.unhold()
	}
	if c.sub != nil {
		c.sub.Close()
	}
	if c.mqtt != nil {
		c.mqtt.Close()
	}
	c.pubs.leaveTopics()
	c.pubs.abandonForwarded()
}

// ended reports whether the reader must stop reading.
func (c *client) ended() bool {
	closing, _ := c.sess.Closing()
	return closing || c.quitting.Load() || c.stopping.Load() && c.sub == nil
}

func (c *client) logEnd(err error) {
	if err == nil {
		return
	}
	if fault, ok := errors.AsType[*mqttsession.Error](err); ok {
		mqttConn{c}.logEnd(fault)
	} else if fault, ok := errors.AsType[*wire.Error](err); ok {
		c.env.faults.Add(1)
		c.env.log.Warn("connection closed", obs.KeyRemote, c.remote, obs.KeyReason, fault.Code, obs.KeyError, err)
	} else if c.env.log.Enabled(context.Background(), slog.LevelDebug) { // most connections end with an error
		c.env.log.Debug("connection ended", obs.KeyRemote, c.remote, obs.KeyError, err)
	}
}

// isEnd reports whether a read error is the end of the stream. Wrapped streams rarely end cleanly,
// because clients just close.
func isEnd(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed)
}

// verdict says what became of a command. If the command is not carried out, it is in the task.
type verdict uint8

const (
	carriedOut verdict = iota
	mustWait           // only a goroutine may carry out the command, because the command may block
	mustMove           // the connection needs a goroutine from this command on
)

// maxTurn limits the commands that consume carries out at once, so that other connections have their
// turn. Commands in batches do not count, because such a command costs little, unless the command is
// refused. The limit also bounds the output of a turn.
const maxTurn = 256

type task struct {
	op      session.Op
	n       int           // size of the command in bytes
	arrival stamp.Arrival // of a publish; valid if stamped
	stamped bool
}

// consume handles the whole commands in the buffer, then writes the replies. After maxTurn commands it
// sets paused, and the driver calls consume again before it reads. If the driver does not admit an
// operation, consume leaves it in t and returns mustWait or mustMove. An error ends the connection.
func (c *client) consume(t *task) (verdict, error) {
	now := clock.Mono()
	c.wall = clock.Wall()
	if c.mqtt != nil {
		c.mqtt.UseTime(c.wall)
		if c.mqtt.Stale() && !c.driver.nonblocking() {
			if err := (mqttConn{c}).refresh(); err != nil {
				return carriedOut, err
			}
		}
	}
	filled := c.w == len(c.buf)
	c.turn, c.paused = 0, false
	for {
		t.n, t.stamped = c.sess.StepInto(c.buf[c.r:c.w], now, &t.op), false
		if t.n == 0 && t.op.Kind == session.OpNone {
			break
		}
		if v, err := c.carryOut(t, now); v != carriedOut || err != nil {
			return v, err
		}
		if closing, _ := c.sess.Closing(); closing {
			break
		}
		if c.turn >= maxTurn {
			c.paused = true
			break
		}
	}
	if v := c.flushBatch(now); v != carriedOut {
		*t = task{}
		return v, nil
	}
	c.flushFins(now)
	c.settle()
	// A client that fills its buffer sends more than the buffer was sized for.
	if filled && c.r == c.w && len(c.buf) < maxIdle {
		c.grow(2 * len(c.buf))
	}
	return carriedOut, c.driver.reply()
}

// carryOut carries out a command and consumes its bytes. An error ends the connection.
func (c *client) carryOut(t *task, now mono.Time) (verdict, error) {
	op, on := &t.op, c.driver
	if op.Kind != session.OpFin { // every driver admits FIN
		c.flushFins(now)
		if v := on.admits(op, now); v != carriedOut {
			return v, nil
		}
	}
	joined, v := c.joinBatch(t, now)
	if joined {
		return carriedOut, nil
	}
	if v == carriedOut {
		v = c.flushBatch(now)
	}
	if v != carriedOut {
		return v, nil
	}
	if op.Kind != session.OpFin {
		c.turn++
	}
	switch {
	case op.Kind.Upgrade():
		c.settle()
		if err := on.reply(); err != nil {
			return carriedOut, err
		}
		err := on.upgrade(*op)
		c.sess.Answer(op, err)
		c.markVerified()
	case op.Kind.Publishes():
		topic, err := c.publish(t, now)
		if errors.Is(err, broker.ErrBusy) {
			return mustWait, nil
		}
		c.answerPublish(op, topic, err)
		c.pubs.alone = false
	case op.Kind == session.OpFin:
		c.settle()
		if op.MQTT != nil && !c.mqtt.Sources.Finishing(op.MQTT.Source, c.fins != nil) {
			c.flushFins(now)
			c.mqtt.Sources.Finishing(op.MQTT.Source, false)
		}
		c.finish(op.ID, now)
	case op.Kind != session.OpNone:
		c.settle()
		err := c.runCommand(op, now)
		c.sess.Answer(op, err)
		if op.Kind == session.OpAuth || op.Kind == session.OpConnect {
			c.markVerified()
		}
		if c.mqtt != nil && c.mqtt.Stale() {
			c.r += t.n
			return carriedOut, mqttConn{c}.refresh()
		}
	}
	c.r += t.n
	if op.Kind == session.OpSub && c.sub != nil {
		return carriedOut, on.subscribed()
	}
	return carriedOut, nil
}

// markVerified counts the client as verified once it has completed TLS and AUTH, where these are
// required.
func (c *client) markVerified() {
	if !c.peer.Restricted() {
		c.env.clients.markVerified(c)
	}
}

func (c *client) runCommand(op *session.Op, now mono.Time) error {
	switch op.Kind {
	case session.OpIdentify:
		id := c.peer.Identity()
		c.stats.identity.Store(&id)
		if c.pubs.origin == nil {
			for _, target := range c.pubs.targets {
				target.publisher.Rename(id.ClientID, c.identity())
			}
		}
		c.pubs.endForwarding() // forwarding used the old identity
		return nil
	case session.OpAuth:
		return c.authenticate(op)
	case session.OpSub:
		return c.subscribe(op, now)
	case session.OpRdy:
		return c.ready(op.Ready)
	case session.OpReq:
		err := c.commands.Requeue(op.ID, op.Timeout)
		if err == nil {
			add(&c.stats.requeued, 1)
		}
		return err
	case session.OpTouch:
		return c.commands.Touch(op.ID)
	case session.OpPace:
		c.pubs.weight = uint8(op.Ready)
		for _, target := range c.pubs.targets {
			target.publisher.Pace(c.pubs.weight)
		}
		return nil
	case session.OpCls:
		c.stats.state.Store(int32(StateClosing))
		return c.ready(0)
	case session.OpConnect, session.OpSubscribe, session.OpUnsubscribe, session.OpDisconnect:
		return mqttConn{c}.run(op)
	}
	return nil
}

// ready sets RDY. A subscription that ended with its topic or channel is not the client's error.
// The writer ends the connection then.
func (c *client) ready(n int) error {
	if err := c.commands.Ready(n); !errors.Is(err, broker.ErrGone) {
		return err
	}
	return nil
}

func (c *client) subscribe(op *session.Op, now mono.Time) error {
	sub, err := openSubscription(c, op, now, c.notifier())
	if err != nil {
		return err
	}
	c.sub, c.deliveries, c.commands = sub.subscription, sub.deliveries, sub.commands
	c.stats.sub.Store(&subscribed{c.deliveries, string(op.Topic), string(op.Channel)})
	c.stats.state.Store(int32(StateSubscribed))
	return nil
}

// openSubscription subscribes to op's topic and channel, at this broker or at the topic's brokers. notify
// reports messages.
func openSubscription(c *client, op *session.Op, now mono.Time, notify func()) (sub consumer, err error) {
	if err := c.permit(op, now); err != nil {
		return sub, err
	}
	for {
		local, err := subscribeHere(c, op, notify)
		if err == nil {
			return consumer{local, local, local}, nil
		}
		if !c.shouldForward(err) {
			return sub, err
		}
		relayed, err := c.relay(op, nil, notify)
		if err != nil {
			return sub, Refusal(op.Topic, err)
		}
		if relayed != nil {
			return consumer{relayed, relayed, relayed}, nil
		}
	}
}

// subscribeHere subscribes to op's topic and channel at this broker. If the topic is elsewhere, shouldForward
// reports true for the error.
func subscribeHere(c *client, op *session.Op, notify func()) (*broker.Subscription, error) {
	id := c.peer.Identity()
	params := broker.Subscriber{
		MsgTimeout: id.MsgTimeout,
		SampleRate: id.SampleRate,
		Distance:   c.env.cfg.distance(id.Region, id.Zone),
	}
	for {
		t, err := c.env.broker.TopicForClient(op.Topic)
		if err == nil && c.env.cfg.Forward != nil && t.Uncreated() {
			err = broker.ErrUnknownTopic
		}
		switch {
		case c.shouldForward(err):
			return nil, err
		case errors.Is(err, broker.ErrTooManyTopics):
			return nil, wire.Wrap(wire.CodeSubFailed, "SUB failed, the limit of topics is reached", err)
		case err != nil:
			return nil, Refusal(op.Topic, err)
		}
		local, err := t.Subscribe(string(op.Channel), params, notify)
		switch {
		case err == nil:
			return local, nil
		case errors.Is(err, broker.ErrStorage):
			return nil, wire.Wrap(wire.CodeSubFailed, "SUB failed, the channel cannot be stored now", err)
		case !errors.Is(err, broker.ErrGone): // ErrGone: deleted since the look-up
			return nil, Refusal(op.Topic, err)
		}
	}
}

// ignoreClosed drops the error of an operation on a connection that this side closed on purpose.
func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}
