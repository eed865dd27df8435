package conn

import (
	"errors"
	"fmt"
	"slices"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/forward"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/pacing/police"
)

// publisher is a connection's publishing. Owned by its reader.
type publisher struct {
	targets   []target  // each topic once; at most maxTargets, the last ones
	batch     *pubBatch // nil: no publishes wait to be handed over
	unsettled []unsettled
	stored    broker.Stored // of the last publish that its topic stored
	mpub      wire.Batch    // the MPUB in hand: broker.Bodies, without an allocation
	weight    uint8         // of PACE; 0: it was not sent
	forwarding
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

// publish hands a message, or a batch, to its topic, which it returns.
func (c *client) publish(t *task, now mono.Time) (*broker.Topic, error) {
	op := &t.op
	if err := c.permit(op, now); err != nil {
		return nil, err
	}
	p := broker.Published{Body: op.Body, Arrival: c.arrival(t), Defer: op.Defer, Stored: &c.pubs.stored, NoWait: c.on().nonblocking()}
	if op.Kind == session.OpMpub {
		c.pubs.mpub = op.Batch
		t, err := c.hand(op.Topic, p, &c.pubs.mpub, now)
		c.pubs.mpub = wire.Batch{}
		return t, err
	}
	return c.hand(op.Topic, p, nil, now)
}

// arrival returns when the command came, asking once. Requires: it is at buf[r].
func (c *client) arrival(t *task) stamp.Arrival {
	if !t.stamped {
		start := c.in.Offset() - int64(c.w-c.r)
		t.arrival, t.stamped = c.on().arrival(start, start+int64(t.n)), true
	}
	if t.arrival.At < c.pubs.notBefore {
		t.arrival = stamp.Arrival{At: c.pubs.notBefore, Source: stamp.Read}
	}
	return t.arrival
}

// publishTo finds the topic, at best without a look-up. What it returns holds
// until the next call.
func (c *client) publishTo(name []byte) (*target, error) {
	if to := c.target(name); to != nil {
		return to, nil
	}
	find := c.env.broker.TopicForClient
	if c.on().nonblocking() {
		find = c.env.broker.Topic // others may have to be asked before it is created
	}
	t, err := find(name)
	if err == nil && t.Retired() {
		err = broker.ErrRetired
	}
	switch {
	case err != nil && c.on().nonblocking():
		return nil, broker.ErrBusy
	case err != nil && c.passesOn(err):
		return nil, errElsewhere
	case err != nil:
		return nil, refusal(name, err)
	}
	c.settleForwarded() // it may have been elsewhere until now: what was sent there comes first
	if len(c.pubs.targets) == maxTargets {
		c.leaveTopic(c.pubs.targets[0].topic)
	}
	as := c.addPublisher(t)
	if c.pubs.weight > 0 {
		as.Pace(c.pubs.weight)
	}
	c.pubs.targets = append(c.pubs.targets, target{t, as, c.stats.counter(t.Name())})
	return &c.pubs.targets[len(c.pubs.targets)-1], nil
}

// identity is who publishes: whom an auth server, or a certificate, says it is, else
// what it says itself, else its host.
func (c *client) identity() police.Identity {
	if o := c.pubs.origin; o != nil {
		return police.Identity{Kind: o.Kind, ID: o.ID}
	}
	state := c.stats.tls.Load()
	switch {
	case c.cred.grant != nil && c.cred.grant.Identity != "":
		return police.Identity{Kind: "auth", ID: c.cred.grant.Identity}
	case state != nil && len(state.VerifiedChains) > 0 && state.PeerCertificates[0].Subject.CommonName != "":
		return police.Identity{Kind: "cert", ID: state.PeerCertificates[0].Subject.CommonName}
	case c.sess.Identity().ClientID != "":
		return police.Identity{Kind: "client", ID: c.sess.Identity().ClientID}
	}
	return police.Identity{Kind: "addr", ID: c.remoteIP()}
}

// target returns the topic of that name that the connection has published to;
// nil if it has not.
func (c *client) target(name []byte) *target {
	for i := range c.pubs.targets {
		if to := &c.pubs.targets[i]; to.topic.Name() == string(name) {
			return to
		}
	}
	return nil
}

func (c *client) leaveTopic(t *broker.Topic) {
	c.pubs.targets = slices.DeleteFunc(c.pubs.targets, func(is target) bool {
		if is.topic == t {
			is.as.Leave()
		}
		return is.topic == t
	})
}

// leaveTopics leaves all of them, and those that are elsewhere.
func (c *client) leaveTopics() {
	c.endForwarding()
	for _, is := range c.pubs.targets {
		is.as.Leave()
	}
	c.pubs.targets = nil
}

// hand gives a message, or with bodies a batch, to the topic of that name, which
// it returns; nil: it was forwarded, and what comes of that is in pubs.sent. ErrBusy only if p
// says NoWait, or for the committer.
func (c *client) hand(name []byte, p broker.Published, bodies *wire.Batch, now mono.Time) (*broker.Topic, error) {
	for {
		to, err := c.publishTo(name)
		if errors.Is(err, errElsewhere) {
			return nil, c.forward(name, &p, bodies)
		}
		if err != nil {
			return nil, err
		}
		t, n := to.topic, 1
		if p.From = to.as; p.Arrival.At < c.pubs.notBefore {
			p.Arrival = stamp.Arrival{At: c.pubs.notBefore, Source: stamp.Read}
		}
		if t.Durable() && p.NoWait {
			return t, broker.ErrBusy
		}
		if bodies != nil {
			n = bodies.Len()
			err = t.PublishBatch(now, c.wall, p, bodies)
		} else {
			err = t.Publish(now, c.wall, p)
		}
		switch {
		case err == nil:
			add(&to.count.count, n)
			return t, nil
		case errors.Is(err, broker.ErrBusy):
			return t, err
		case !errors.Is(err, broker.ErrGone) && !errors.Is(err, broker.ErrRetired):
			return t, refusal(name, err)
		}
		c.leaveTopic(t) // deleted, or moved away, since it was looked up
	}
}

// unsettled is a publish that is not answered yet: it, or one before it, has to
// be durable first, or was forwarded and is not answered by its broker.
type unsettled struct {
	kind  session.OpKind
	topic *broker.Topic // nil: it was forwarded, or refused
	at    broker.Stored // in topic
	sent  *forward.Pending
	err   error
}

// published answers a publish: at once, unless the topic keeps its messages on
// disk; then together with those behind it, so that they share one fsync.
func (c *client) published(op *session.Op, t *broker.Topic, err error) {
	sent := c.pubs.takeSent()
	if len(c.pubs.unsettled) == 0 && sent == nil && (err != nil || !t.Durable()) {
		if err == nil {
			op.Reply = c.advice(t)
		}
		c.sess.Answer(op, err)
		return
	}
	c.pubs.unsettled = append(c.pubs.unsettled, unsettled{kind: op.Kind, topic: t, at: c.pubs.stored, sent: sent, err: err})
	if sent != nil && sent.Failed() { // it may end the connection, and what follows would not be answered
		c.settle()
	}
}

// advice returns what a publish to the topic is answered with instead of OK; nil: it is
// not.
func (c *client) advice(t *broker.Topic) []byte {
	if c.pubs.weight == 0 {
		return nil
	}
	for i := range c.pubs.targets {
		if to := &c.pubs.targets[i]; to.topic == t {
			return to.as.Advice()
		}
	}
	return nil
}

// settle makes the publishes durable that wait for it, waits for the answers to those that were
// forwarded, and answers all of them.
func (c *client) settle() {
	if len(c.pubs.unsettled) == 0 {
		return
	}
	c.pubs.away = false
	for _, u := range c.pubs.unsettled {
		op := session.Op{Kind: u.kind}
		switch {
		case u.err != nil:
		case u.sent != nil:
			u.err = u.sent.Verdict(u.kind.Failed())
		case u.topic.Durable():
			u.err = refusal([]byte(u.topic.Name()), u.topic.Sync(u.at)) // the first has the others' fsync done, too
		}
		if u.err == nil && u.topic != nil {
			op.Reply = c.advice(u.topic)
		}
		c.sess.Done(op, u.err)
	}
	clear(c.pubs.unsettled)
	c.pubs.unsettled = c.pubs.unsettled[:0]
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
	case errors.Is(err, broker.ErrUnknownTopic), errors.Is(err, broker.ErrRetired):
		return wire.Wrap(wire.CodeBadTopic, fmt.Sprintf("topic %q is not on this broker: create it with srtm topic create %[1]s; if it exists, publish through srtm agent, or to the tcp_address of the loaddistributor's GET /publisher?topic=%[1]s&id=PUBLISHER", topic), err)
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
