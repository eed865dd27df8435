package conn

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/srtm-io/srtm/client/pool"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/nsq/origin"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/forward"
)

// forwarding is a connection's publishes to topics that are on other brokers, or its own, if it
// is another broker's that forwards. Owned by the connection's reader.
//
// Nothing is forwarded on a loop or by a committer: the connection's command waits, as for a
// disk (errWaits), and a goroutine carries it out and all that was read behind it. It sends
// publish after publish, waits for the answers once at the end, and the loop writes them.
type forwarding struct {
	line       *forward.Line    // nil: nothing was forwarded
	sent       *forward.Pending // of the publish that was just handed over; nil: it was not forwarded
	notBefore  mono.Time        // what the connection publishes from now on arrived no earlier
	away       bool             // some of the unsettled publishes were forwarded
	committing bool             // a committer carries out the command: it waits for the disk alone
	origin     *origin.Origin   // for whom the client publishes, which is a broker; nil: it is none
}

// errElsewhere: the topic is not on this broker, and what is published to it is forwarded.
var errElsewhere = errors.New("the topic is on another broker")

// passesOn reports whether what is published is forwarded, where the broker says err of its
// topic. What another broker forwarded is not.
func (c *client) passesOn(err error) bool {
	return c.env.cfg.Forward != nil && c.pubs.origin == nil && (errors.Is(err, broker.ErrUnknownTopic) || errors.Is(err, broker.ErrRetired))
}

// forward sends a message, or with bodies a batch, to the broker of its publisher. Error: ErrBusy,
// where that may not wait.
func (c *client) forward(name []byte, p *broker.Published, bodies *wire.Batch) error {
	if p.NoWait || c.pubs.committing {
		return broker.ErrBusy
	}
	if closing, _ := c.sess.Closing(); closing {
		return broker.ErrDraining // it would not be answered
	}
	if c.pubs.line == nil {
		c.pubs.line = c.env.cfg.Forward.Line(c.asPublisher())
	}
	m, n := pool.Message{Body: p.Body, Defer: p.Defer}, 1
	if bodies != nil {
		m.Batch, n = bodies, bodies.Len()
	}
	c.pubs.sent, c.pubs.away = c.pubs.line.Begin(c.env.ctx, string(name), m), true
	add(&c.stats.counter(string(name)).count, n)
	return nil
}

const (
	// createdWithin is how many times the brokers of a topic are asked for that was just created,
	// and knownAfter is how long after each other.
	createdWithin = 10
	knownAfter    = 200 * time.Millisecond
)

// relay subscribes to a topic that is not on this broker: at the brokers that have it. If the
// topic does not exist, it is created. Then it may be on this broker, and relay returns it.
// Errors: ErrUnknownTopic, *wire.Error.
func (c *client) relay(op *session.Op, id *session.Identity) (t *broker.Topic, sub subscription, err error) {
	about := forward.Subscriber{Publisher: c.asPublisher(), Hostname: id.Hostname, MsgTimeout: id.MsgTimeout, SampleRate: id.SampleRate}
	name := string(op.Topic)
	err = c.interruptibly(func(ctx context.Context) error {
		relayed, err := c.env.cfg.Forward.Subscribe(ctx, name, string(op.Channel), about, c.on().notify)
		if forward.IsUnknown(err) {
			failed := c.env.cfg.Forward.Create(ctx, name, about.Publisher)
			if failed != nil {
				c.env.log.Warn("a topic that a client subscribes to is not found or created", obs.KeyRemote, c.remote, obs.KeyTopic, name, obs.KeyError, failed)
			}
			if t, err = c.env.broker.Topic(op.Topic); err == nil {
				return nil
			}
			if failed != nil {
				return err
			}
			// The loaddistributor that is asked for the brokers may know the new topic later than
			// the one that created it.
			for range createdWithin {
				relayed, err = c.env.cfg.Forward.Subscribe(ctx, name, string(op.Channel), about, c.on().notify)
				if !forward.IsUnknown(err) || !clock.Sleep(ctx, knownAfter) {
					break
				}
			}
		}
		if err == nil {
			sub = relayed
		}
		return err
	})
	if forward.IsUnknown(err) {
		err = broker.ErrUnknownTopic
	}
	return t, sub, err
}

// asPublisher is the client as other brokers are to see it.
func (c *client) asPublisher() forward.Publisher {
	return forward.Publisher{ClientID: c.sess.Identity().ClientID, Identity: c.identity(), Host: c.remoteIP()}
}

// takeSent returns what the publish in hand was forwarded as, once.
func (f *forwarding) takeSent() *forward.Pending {
	sent := f.sent
	f.sent = nil
	return sent
}

// settleForwarded answers the publishes that were forwarded.
func (c *client) settleForwarded() {
	if c.pubs.away {
		c.settle()
		// Topics are in order of arrival: what follows comes after what was forwarded.
		c.pubs.notBefore, c.wall = clock.Mono(), clock.Wall()
	}
}

// abandonForwarded gives up what was forwarded and will not be answered.
func (c *client) abandonForwarded() {
	for _, u := range c.pubs.unsettled {
		if u.sent != nil {
			u.sent.Abandon()
		}
	}
	c.pubs.unsettled = nil
}

// endForwarding gives back the connection's publishers at other brokers. The next one is opened
// as whom the client is then.
func (c *client) endForwarding() {
	if c.pubs.line != nil {
		c.pubs.line.Close()
		c.pubs.line = nil
	}
}

// publishesFor carries out AUTH of a broker that forwards what another client publishes to it.
func (c *client) publishesFor(op *session.Op) error {
	o, err := c.env.cfg.Forward.Origin(op.Body)
	if err != nil {
		return wire.Wrap(wire.CodeAuthFailed, "AUTH failed", err)
	}
	reply, err := json.Marshal(struct {
		Identity string `json:"identity"`
	}{o.ID})
	if err != nil {
		return fmt.Errorf("encode the answer to AUTH: %w", err)
	}
	op.Reply, c.pubs.origin = reply, &o
	c.stats.origin.Store(&o)
	c.leaveTopics() // they were joined as another
	return nil
}

// addPublisher has the client be one of the topic's publishers.
func (c *client) addPublisher(t *broker.Topic) *broker.Publisher {
	o := c.pubs.origin
	if o == nil {
		return t.AddPublisher(c.sess.Identity().ClientID, c.remoteIP(), c.identity())
	}
	var as *broker.Publisher
	if o.Visits {
		as = t.Visit(c.identity())
	} else {
		as = t.AddPublisher(o.ClientID, o.Host, c.identity())
	}
	as.Forwarded(o.Broker)
	return as
}
