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

// Connection is a client's connection. Authenticate, Permit, Subscribe and Relay may block. Only the
// connection's reader calls the methods. Errors are *wire.Error or errors of the broker.
type Connection interface {
	// Authenticate queries the auth server, if there is one.
	Authenticate(secret string) error
	// Permit reports whether the client may publish to the topic.
	Permit(topic string) error
	// Subscribe opens a subscription to this broker's part of the topic. nil: this broker has no part.
	Subscribe(topic, channel string, notify func()) (Subscription, error)
	// Relay relays a subscription from all other brokers of the topic. here means that the client has a
	// subscription to this broker's part. Relay waits for the other brokers, but for brokers that do not answer
	// only until the given time. If here is not set and the topic does not exist, Relay creates the topic. nil:
	// the broker does not forward, or the new topic is on this broker. With here, the error
	// broker.ErrUnknownTopic means that the control plane does not know the topic.
	Relay(topic, channel string, here bool, until mono.Time, notify func()) (Subscription, Others, error)
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

// Others are the other brokers of a relay, a forward.Subscription. A change of Brokers or Here causes a
// notification.
type Others interface {
	Brokers() int // number of connected brokers
	Here() bool   // this broker has a part of the topic
}

// Client is the MQTT side of a connection. It is the connection's session, and the owner of the sources.
// The connection's reader calls the methods, except the methods of Sources, which a writer may call.
type Client struct {
	// Set once.
	server  *Server
	conn    Connection
	Sources Sources

	// mu orders the reader and a writer that encodes messages. It is held for pure steps only. The reader
	// alone uses the fields that the encoding of messages does not touch, so it reads them without mu. A client
	// that only publishes has no writer and needs no mu, see lock.
	mu      sync.Mutex
	shared  bool // a writer may use Session; set by the reader before the first source
	Session *session.Session
	rules   *names.Rules // of Session

	version  atomic.Uint32                 // protocol level of CONNECT; 0: none yet
	stale    atomic.Bool                   // the sources may differ from the filters
	farewell atomic.Pointer[session.Error] // why the broker ends the connection; nil: the broker stops
	home     atomic.Pointer[Home]          // written by the reader; nil: none

	// Set by CONNECT, and used by the reader.
	entry     *entry // nil: not accepted, or closed
	record    record
	redirects bool        // the client follows server references
	claimed   []string    // channels with their topics, for which Config.ClaimChannel has succeeded
	retry     *time.Timer // calls refresh at retryAt; nil: none
	retryAt   mono.Time
	will      atomic.Pointer[nsq.Will] // to publish if the connection fails
}

// lock locks mu, if there may be a writer.
func (c *Client) lock() {
	if c.shared {
		c.mu.Lock()
	}
}

func (c *Client) unlock() {
	if c.shared {
		c.mu.Unlock()
	}
}

// StepInto is session.StepInto with the current rules.
func (c *Client) StepInto(in []byte, now mono.Time, op *nsq.Op) int {
	c.lock()
	defer c.unlock()
	if rules := c.server.rules.Load(); rules != c.rules {
		c.rules = rules
		c.Session.UseRules(rules)
		c.stale.Store(true)
	}
	n := c.Session.StepInto(in, now, op)
	switch op.Kind {
	case nsq.OpPub:
		c.server.countIgnored(op.MQTT)
	case nsq.OpConnect:
		c.version.Store(uint32(c.Session.Version()))
	}
	return n
}

// Answer is session.Answer.
func (c *Client) Answer(op *nsq.Op, err error) {
	c.lock()
	defer c.unlock()
	c.Session.Answer(op, err)
}

// ClearOutput is session.ClearOutput.
func (c *Client) ClearOutput() {
	c.lock()
	defer c.unlock()
	c.Session.ClearOutput()
}

// Tick is session.Tick.
func (c *Client) Tick(now mono.Time) {
	c.lock()
	defer c.unlock()
	c.Session.Tick(now)
}

// Output is session.Output.
func (c *Client) Output() []byte { return c.Session.Output() }

// Closing is session.Closing.
func (c *Client) Closing() (closing bool, cause error) { return c.Session.Closing() }

// Deadline is session.Deadline.
func (c *Client) Deadline() mono.Time { return c.Session.Deadline() }

// UseTime is session.UseTime.
func (c *Client) UseTime(wall mono.Wall) {
	c.lock()
	defer c.unlock()
	c.Session.UseTime(wall)
}

// Protocol names the client's protocol, for people. Any goroutine may call Protocol.
func (c *Client) Protocol() string {
	switch c.version.Load() {
	case 4:
		return "mqtt3.1.1"
	case 5:
		return "mqtt5"
	}
	return "mqtt"
}

// Patient reports whether the broker repeats a refused publish until the message fits. MQTT 3.1.1 has no
// refusal of a publish. So the broker does not read from the connection meanwhile. c may be nil: NSQ.
func (c *Client) Patient(op *nsq.Op) bool {
	return c != nil && op.Packet != 0 && c.Session.Version() == 4
}

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
	c.Session.Disconnect(e)
}

// MovePublisher sets the reason of a connection that the driver ends because its publisher belongs to
// another broker, and this broker does not forward. A 5.0 client may then connect to any broker, also to
// this broker again. c may be nil: NSQ. Any goroutine may call MovePublisher.
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
