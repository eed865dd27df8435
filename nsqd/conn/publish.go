package conn

import (
	"errors"
	"fmt"
	"slices"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/forward"
	"github.com/srtm-io/srtm/nsqd/mqtt"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/pacing/police"
)

// publisher is a connection's publishing state. Owned by its reader.
type publisher struct {
	targets   []target  // distinct topics and publishers, at most maxTargets, most recent last
	batch     *pubBatch // nil: no publishes wait in a batch
	unsettled []unsettled
	alone     bool          // the current publish may have to be repeated, so it joins no commit
	stored    broker.Stored // position of the last publish that its topic stored
	mpub      wire.Batch    // the current MPUB, kept here to avoid an allocation
	weight    uint8         // from PACE; 0: no PACE
	forwarding
}

// message returns the message of PUB or DPUB, or the common properties of the messages of MPUB.
func (p *publisher) message(op *session.Op, arrival stamp.Arrival) broker.Published {
	m := broker.Published{Body: op.Body, Arrival: arrival, Defer: op.Defer, Prefixed: p.prefixed}
	if op.MQTT != nil {
		m.Attribute = op.MQTT.Attribute
	}
	return m
}

// target is a topic to which the connection publishes. It saves the look-up, and registers the
// connection as a publisher of the topic.
type target struct {
	topic     *broker.Topic
	as        string            // the publisher that a rule of MQTT names; empty: the connection
	publisher *broker.Publisher // the connection, or as, as a publisher of the topic
	count     *pubCount         // messages to the topic
}

// publisherOf returns the publisher that a rule of MQTT names; empty: the connection.
func publisherOf(op *session.Op) []byte {
	if op.MQTT == nil {
		return nil
	}
	return op.MQTT.Publisher
}

// maxTargets limits the topics and publishers that a connection keeps alive, and the length of a search.
const maxTargets = 64

// publish publishes a message or a batch. It returns the topic.
func (c *client) publish(t *task, now mono.Time) (*broker.Topic, error) {
	op := &t.op
	if err := c.permit(op, now); err != nil {
		return nil, err
	}
	if c.env.isTooLarge(op) {
		return nil, wire.NewError(wire.CodeBadMessage, fmt.Sprintf("the envelope of %d bytes is larger than --max-msg-size %d", len(op.Body), c.env.cfg.Session.Limits.MaxMessageSize))
	}
	p := c.pubs.message(op, c.arrival(t))
	p.Stored, p.NoWait = &c.pubs.stored, c.driver.nonblocking()
	if op.Kind == session.OpMpub {
		c.pubs.mpub = op.Batch
		t, err := c.publishNamed(op.Topic, nil, p, &c.pubs.mpub, now)
		c.pubs.mpub = wire.Batch{}
		return t, err
	}
	for {
		t, err := c.publishNamed(op.Topic, publisherOf(op), p, nil, now)
		if !c.mqtt.Patient(op) {
			return t, err
		}
		if sent := c.pubs.takeSent(); sent != nil {
			err = sent.Verdict(op.Kind.Failed())
		}
		switch {
		case !mqtt.IsTemporary(err):
			return t, err
		case p.NoWait || c.pubs.committing:
			return t, broker.ErrBusy
		case !mqttConn{c}.waitToRepeat(err):
			return t, err
		}
		now = clock.Mono()
	}
}

// isTooLarge reports whether an MQTT message's envelope is larger than a message may be. The sessions
// check the sizes of payloads, and an envelope is larger than its payload.
func (e *env) isTooLarge(op *session.Op) bool {
	return op.MQTT != nil && len(op.Body) > e.cfg.Session.Limits.MaxMessageSize
}

// arrival returns the arrival time of the command, computed once. Requires: the command is at
// buf[r].
func (c *client) arrival(t *task) stamp.Arrival {
	if !t.stamped {
		start := c.in.Offset() - int64(c.w-c.r)
		t.arrival, t.stamped = c.driver.arrival(start, start+int64(t.n)), true
	}
	if t.arrival.At < c.pubs.notBefore {
		t.arrival = stamp.Arrival{At: c.pubs.notBefore, Source: stamp.Read}
	}
	return t.arrival
}

// publishTo returns the target for a topic and a publisher (target.as). The result is valid until the
// next call.
func (c *client) publishTo(name, as []byte) (*target, error) {
	if found := c.pubs.target(name, as); found != nil {
		return found, nil
	}
	find := c.env.broker.TopicForClient
	if c.driver.nonblocking() {
		find = c.env.broker.Topic // creating a topic may require requests to other processes
	}
	t, err := find(name)
	if err == nil && (t.Retired() || c.stats.movedAway(name)) {
		err = broker.ErrRetired
	}
	switch {
	case err != nil && !wire.ValidTopicName(name): // no look-up finds the topic, so no goroutine is needed
		return nil, Refusal(name, broker.ErrBadName)
	case err != nil && c.driver.nonblocking():
		return nil, broker.ErrBusy
	case err != nil && c.shouldForward(err):
		return nil, errElsewhere
	case err != nil:
		return nil, Refusal(name, err)
	}
	c.settleForwarded() // the topic may have been on another broker: earlier publishes come first
	if len(c.pubs.targets) == maxTargets {
		c.pubs.targets[0].publisher.Leave()
		c.pubs.targets = slices.Delete(c.pubs.targets, 0, 1)
	}
	publisher := c.addPublisher(t, string(as))
	if c.pubs.weight > 0 {
		publisher.Pace(c.pubs.weight)
	}
	c.pubs.targets = append(c.pubs.targets, target{t, string(as), publisher, c.stats.counter(t.Name())})
	mqttConn{c}.seekHome(t.Name(), string(as), "")
	return &c.pubs.targets[len(c.pubs.targets)-1], nil
}

// addPublisher registers the client, or the publisher that a rule of MQTT names, as a publisher of the
// topic.
func (c *client) addPublisher(t *broker.Topic, as string) *broker.Publisher {
	o := c.pubs.origin
	if as != "" {
		return t.AddPublisher(as, hostOf(c.remote), DeviceIdentity(as))
	}
	if o == nil {
		return t.AddPublisher(c.peer.Identity().ClientID, hostOf(c.remote), c.identity())
	}
	var publisher *broker.Publisher
	if o.Visits {
		publisher = t.Visit(c.identity())
	} else {
		publisher = t.AddPublisher(o.ClientID, o.Host, c.identity())
	}
	publisher.Forwarded(o.Broker)
	return publisher
}

// identity returns the publisher's identity: from the auth server, else from the certificate, else
// the client id, else the host.
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
	case c.peer.Identity().ClientID != "":
		return police.Identity{Kind: "client", ID: c.peer.Identity().ClientID}
	}
	return police.Identity{Kind: "addr", ID: hostOf(c.remote)}
}

// target returns the connection's target with that topic name and publisher, or nil. A target is not used
// while its publisher belongs to another broker.
func (p *publisher) target(name, as []byte) *target {
	for i := range p.targets {
		if target := &p.targets[i]; target.topic.Name() == string(name) && target.as == string(as) && !target.count.moved.Load() {
			return target
		}
	}
	return nil
}

func (p *publisher) leaveTopic(t *broker.Topic) {
	p.targets = slices.DeleteFunc(p.targets, func(target target) bool {
		if target.topic == t {
			target.publisher.Leave()
		}
		return target.topic == t
	})
}

// leaveTopics leaves all topics, including topics on other brokers.
func (p *publisher) leaveTopics() {
	p.endForwarding()
	for _, target := range p.targets {
		target.publisher.Leave()
	}
	p.targets = nil
}

// publishNamed publishes a message, or the batch bodies, to the named topic. It returns the topic,
// or nil if the publish was forwarded (then it is in pubs.sent). It returns ErrBusy only for the
// committer or if p.NoWait is set.
func (c *client) publishNamed(name, as []byte, p broker.Published, bodies *wire.Batch, now mono.Time) (*broker.Topic, error) {
	for {
		target, err := c.publishTo(name, as)
		if errors.Is(err, errElsewhere) {
			return nil, c.forward(name, string(as), &p, bodies)
		}
		if err != nil {
			return nil, err
		}
		t, n := target.topic, 1
		if p.From = target.publisher; p.Arrival.At < c.pubs.notBefore {
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
			add(&target.count.count, n)
			return t, nil
		case errors.Is(err, broker.ErrBusy):
			return t, err
		case !errors.Is(err, broker.ErrGone) && !errors.Is(err, broker.ErrRetired):
			return t, Refusal(name, err)
		}
		c.pubs.leaveTopic(t) // deleted, or moved to another broker, since the look-up
	}
}

// unsettled is an unanswered publish. The publish, or an earlier publish, is not durable yet, or
// waits for the answer of another broker.
type unsettled struct {
	receipt
	topic    *broker.Topic // nil: forwarded or refused
	position broker.Stored // position in topic
	sent     *forward.Pending
	err      error
}

// answerPublish answers a publish. A publish to a durable topic, or behind an unanswered publish, is
// answered later in settle, so that several publishes share one fsync.
func (c *client) answerPublish(op *session.Op, t *broker.Topic, err error) {
	sent := c.pubs.takeSent()
	if len(c.pubs.unsettled) == 0 && sent == nil && (err != nil || t == nil || !t.Durable()) {
		if err == nil {
			op.Reply = c.pubs.advice(t)
		}
		c.mqtt.CountRefused(op, err)
		c.sess.Answer(op, err)
		return
	}
	c.pubs.unsettled = append(c.pubs.unsettled, unsettled{receipt: receipt{op.Kind, op.Packet}, topic: t, position: c.pubs.stored, sent: sent, err: err})
	if sent != nil && sent.Failed() { // a failure may end the connection, before later publishes are answered
		c.settle()
	}
}

// advice returns the reply that replaces OK after PACE, or nil.
func (p *publisher) advice(t *broker.Topic) []byte {
	if p.weight == 0 {
		return nil
	}
	for i := range p.targets {
		if target := &p.targets[i]; target.topic == t {
			return target.publisher.Advice()
		}
	}
	return nil
}

// settle makes the waiting publishes durable, waits for the answers to forwarded publishes, and
// answers all of them.
func (c *client) settle() {
	if len(c.pubs.unsettled) == 0 {
		return
	}
	c.pubs.unanswered = false
	op := c.env.answers.Get().(*session.Op)
	for _, u := range c.pubs.unsettled {
		u.set(op)
		switch {
		case u.err != nil:
		case u.sent != nil:
			u.err = u.sent.Verdict(u.kind.Failed())
		case u.topic != nil && u.topic.Durable():
			u.err = Refusal([]byte(u.topic.Name()), u.topic.Sync(u.position)) // the first Sync covers the others
		}
		if u.err == nil && u.topic != nil {
			op.Reply = c.pubs.advice(u.topic)
		}
		c.mqtt.CountRefused(op, u.err)
		c.sess.Answer(op, u.err)
	}
	op.Reply = nil
	c.env.answers.Put(op)
	clear(c.pubs.unsettled)
	c.pubs.unsettled = c.pubs.unsettled[:0]
}

// Refusal translates a broker's error to a wire error. Temporary errors are not fatal: the
// publisher keeps its connection and may try again.
func Refusal(topic []byte, err error) error {
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
		return wire.Wrap(wire.CodeSubFailed, "SUB failed, the channel has its maximum number of consumers", err)
	case errors.Is(err, broker.ErrTooManyChannels):
		return wire.Wrap(wire.CodeSubFailed, "SUB failed, there are as many channels as there may be", err)
	case errors.Is(err, broker.ErrTooManyTopics):
		return wire.Wrap(wire.CodePubFailed, "PUB failed, there are as many topics as there may be", err)
	case errors.Is(err, broker.ErrBadName):
		return wire.Wrap(wire.CodeBadTopic, fmt.Sprintf("topic %q is not a valid name", topic), err)
	}
	return err
}
