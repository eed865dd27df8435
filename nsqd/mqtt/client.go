package mqtt

import (
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/mqtt/names"
	"github.com/srtm-io/srtm/mqtt/session"
	nsq "github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/pacing/police"
)

// Connection is a client's connection. Authenticate, Permit and Subscribe may block. Only the
// connection's reader calls these. Errors are *wire.Error or errors of the broker.
type Connection interface {
	// Authenticate asks the auth server, if there is one.
	Authenticate(secret string) error
	// Permit reports whether the client may publish to the topic.
	Permit(topic string) error
	// Subscribe opens a subscription on this broker, or relays a subscription from others.
	Subscribe(topic, channel string, notify func()) (Subscription, error)
	// Identity is the client's identity as a publisher.
	Identity() police.Identity
	// Notify makes the driver check the client, as for new messages. It does not block.
	Notify()
	// Quit ends the connection at the next message boundary. It does not block.
	Quit()
}

// Subscription is a broker.Subscription or a forward.Subscription. No method blocks.
type Subscription interface {
	Ready(n int) error
	Take(out *broker.Outgoing, limit int) (open bool)
	Wrote(out *broker.Outgoing)
	FinishBatch(now mono.Time, batch []wire.MessageID, errs []error) []error
	Requeue(id wire.MessageID, delay time.Duration) error
	Holds() (ready, inFlight int)
	Close()
}

// Client is the MQTT side of a connection. It is the connection's session, and the owner of the sources.
// The connection's reader calls the methods, except the methods of Sources, which a writer may call.
type Client struct {
	// Set once.
	server  *Server
	conn    Connection
	Sources Sources

	stale    atomic.Bool                   // the sources may differ from the filters
	farewell atomic.Pointer[session.Error] // why the broker ends the connection; nil: the broker stops

	// Set by CONNECT, and used by the reader.
	entry  *entry // nil: not accepted, or closed
	record record
	will   atomic.Pointer[nsq.Will] // to publish if the connection fails

	// mu orders the reader and a writer that encodes messages. It is held for pure steps only.
	mu    sync.Mutex
	sess  *session.Session
	rules *names.Rules // of sess
}

// StepInto is session.StepInto with the current rules.
func (c *Client) StepInto(in []byte, now mono.Time, op *nsq.Op) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if rules := c.server.rules.Load(); rules != c.rules {
		c.rules = rules
		c.sess.UseRules(rules)
		c.stale.Store(true)
	}
	n := c.sess.StepInto(in, now, op)
	if op.Kind == nsq.OpPub {
		c.server.countIgnored(op.MQTT)
	}
	return n
}

// Answer is session.Answer.
func (c *Client) Answer(op *nsq.Op, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sess.Answer(op, err)
}

// Output is session.Output. Encoding messages does not change the output.
func (c *Client) Output() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sess.Output()
}

// ClearOutput is session.ClearOutput.
func (c *Client) ClearOutput() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sess.ClearOutput()
}

// Closing is session.Closing.
func (c *Client) Closing() (bool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sess.Closing()
}

// Deadline is session.Deadline.
func (c *Client) Deadline() mono.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sess.Deadline()
}

// Tick is session.Tick.
func (c *Client) Tick(now mono.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sess.Tick(now)
}

// Need is session.Need.
func (c *Client) Need() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sess.Need()
}

// LastCommand is session.LastCommand.
func (c *Client) LastCommand() mono.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sess.LastCommand()
}

// Identity is session.Identity.
func (c *Client) Identity() nsq.Identity {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sess.Identity()
}

// Restricted is session.Restricted.
func (c *Client) Restricted() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sess.Restricted()
}

// Refuse ends the session because of e.
func (c *Client) Refuse(e *wire.Error) {
	c.disconnect(&session.Error{Reason: session.ReasonOf(e), Text: e.Text})
}

func (c *Client) disconnect(e *session.Error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sess.Disconnect(e)
}

// UseTime is session.UseTime.
func (c *Client) UseTime(wall mono.Wall) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sess.UseTime(wall)
}

// Version is session.Version.
func (c *Client) Version() byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sess.Version()
}

// Protocol names the client's protocol, for people.
func (c *Client) Protocol() string {
	switch c.Version() {
	case 4:
		return "mqtt3.1.1"
	case 5:
		return "mqtt5"
	}
	return "mqtt"
}

// Heard is session.Heard.
func (c *Client) Heard(now mono.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sess.Heard(now)
}

// Patient reports whether a publish that is refused now is repeated until it fits. MQTT 3.1.1 has no
// refusal of a publish. So the broker does not read from the connection meanwhile. c may be nil: NSQ.
func (c *Client) Patient(op *nsq.Op) bool { return c != nil && op.Packet != 0 && c.Version() == 4 }

// IsTemporary reports whether a refused publish may succeed later.
func IsTemporary(err error) bool {
	return err != nil && session.ReasonOf(err) == session.QuotaExceeded
}

// CountRefused counts a refused publish with QoS 0, which gets no answer. c may be nil: NSQ.
func (c *Client) CountRefused(op *nsq.Op, err error) {
	if c != nil && err != nil && op.Packet == 0 {
		c.server.metrics.refusedOnce.Inc()
	}
}

// EndByBroker ends the session because the broker ends the connection.
func (c *Client) EndByBroker() {
	e := c.farewell.Load()
	if e == nil {
		e = &session.Error{Reason: session.ShuttingDown, Text: "the broker stops"}
	}
	c.disconnect(e)
}

// MovePublisher sets the reason of a connection that the driver ends because its publisher belongs to
// another broker. A 5.0 client may connect to any broker that it knows, also to this broker again. c may
// be nil: NSQ. Any goroutine may call MovePublisher.
func (c *Client) MovePublisher(topic string) {
	if c != nil {
		c.farewell.CompareAndSwap(nil, &session.Error{
			Reason: session.UseAnotherServer,
			Text:   "publishers of topic " + strconv.Quote(topic) + " have moved to another broker; connect again",
		})
	}
}

// end makes the connection end with the given reason, unless it has a reason. Any goroutine may call end.
func (c *Client) end(e *session.Error) {
	if c.farewell.CompareAndSwap(nil, e) && e.Reason == session.TakenOver {
		c.server.metrics.takeovers.Inc()
	}
	c.conn.Quit()
}
