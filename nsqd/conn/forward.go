package conn

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
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
	"github.com/srtm-io/srtm/nsqd/mqtt"
	"github.com/srtm-io/srtm/pacing/police"
)

// forwarding holds a connection's publishes to topics on other brokers. If the client is another
// broker that forwards, it holds the origin. Owned by the connection's reader.
//
// A loop or a committer never forwards. The command waits, as for a disk (mustWait), and a
// goroutine carries out the command and all commands that were read after it. The goroutine sends
// all publishes, waits for the answers once at the end, and the loop writes the answers.
type forwarding struct {
	lines      []line           // one for each publisher, at most maxTargets, most recent last
	sent       *forward.Pending // the current publish; nil: not forwarded
	notBefore  mono.Time        // earliest arrival time of later publishes
	unanswered bool             // unsettled has forwarded publishes
	committing bool             // a committer carries out the command, and may only wait for the disk
	origin     *origin.Origin   // the publisher for whom the client, a broker, forwards; nil: the client is not a broker
	prefixed   bool             // origin has Attributes
}

// line forwards for a publisher (target.as).
type line struct {
	as string
	*forward.Line
}

// errElsewhere reports that the topic is on another broker, so a publish must be forwarded.
var errElsewhere = errors.New("the topic is on another broker")

// shouldForward reports whether to forward after the broker returned err for a topic. Publishes that
// another broker forwarded are not forwarded again.
func (c *client) shouldForward(err error) bool {
	return c.env.cfg.Forward != nil && c.pubs.origin == nil && (errors.Is(err, broker.ErrUnknownTopic) || errors.Is(err, broker.ErrRetired))
}

// forward sends a message, or the batch bodies, to the publisher's broker for the topic. It returns
// ErrBusy if the caller may not wait.
func (c *client) forward(name []byte, as string, p *broker.Published, bodies *wire.Batch) error {
	if p.NoWait || c.pubs.committing {
		return broker.ErrBusy
	}
	if closing, _ := c.sess.Closing(); closing {
		return broker.ErrDraining // the client would get no answer
	}
	l := c.pubs.line(as)
	if l == nil {
		l = c.env.cfg.Forward.Line(c.forwardIdentity(as))
		c.pubs.addLine(as, l)
	}
	m, n := pool.Message{Body: p.Body, Defer: p.Defer, Attribute: p.Attribute}, 1
	if bodies != nil {
		m.Batch, n = bodies, bodies.Len()
	}
	c.pubs.sent, c.pubs.unanswered = l.Begin(c.env.ctx, string(name), m), true
	counter, target := c.stats.counter(string(name)), c.pubs.sent.Target()
	add(&counter.count, n)
	if c.pubs.sent.Returned() { // the publisher has moved back
		counter.moved.Store(false)
		target = ""
	}
	if !c.pubs.sent.Failed() {
		mqttConn{c}.seekHome(string(name), as, target)
	}
	return nil
}

// seekHome searches the broker of an MQTT connection's first publisher (target.as), if the client follows
// server references. target is the address of the broker that got the publish; "": this broker. seekHome does
// not block.
func (m mqttConn) seekHome(topic, as, target string) {
	c := m.c
	if c.env.cfg.Forward == nil || !c.mqtt.SeeksHome(topic, as, target) {
		return
	}
	p, secure := c.forwardIdentity(as), c.stats.tls.Load() != nil
	c.mqtt.SetHome(mqtt.Home{Topic: topic, As: as, Publisher: p.Name(), Target: target, Find: func(ctx context.Context) (string, error) {
		return c.env.cfg.Forward.MQTTServer(ctx, topic, p, secure)
	}})
}

// line returns the line of a publisher (target.as), or nil.
func (f *forwarding) line(as string) *forward.Line {
	for _, l := range f.lines {
		if l.as == as {
			return l.Line
		}
	}
	return nil
}

func (f *forwarding) addLine(as string, l *forward.Line) {
	if len(f.lines) == maxTargets {
		f.lines[0].Close()
		f.lines = slices.Delete(f.lines, 0, 1)
	}
	f.lines = append(f.lines, line{as, l})
}

const (
	// findAttempts is the number of attempts to find the brokers of a new topic. findPause is the
	// pause between two attempts.
	findAttempts = 10
	findPause    = 200 * time.Millisecond
)

// relay subscribes at the brokers that have the topic, or at the others alone. If the topic does not exist, relay
// creates it, unless the topic has a part on this broker. If the new topic is on this broker, relay returns nil.
// Errors: ErrUnknownTopic, *wire.Error.
func (c *client) relay(op *session.Op, others *forward.Others, notify func()) (sub *forward.Subscription, err error) {
	id := c.peer.Identity()
	params := forward.Subscriber{
		Publisher: c.forwardIdentity(""), Hostname: id.Hostname, MsgTimeout: id.MsgTimeout, SampleRate: id.SampleRate,
		Attributes: c.mqtt != nil, Others: others,
	}
	name := string(op.Topic)
	err = c.interruptibly(func(ctx context.Context) error {
		sub, err = c.env.cfg.Forward.Subscribe(ctx, name, string(op.Channel), params, notify)
		if !forward.IsUnknown(err) || others != nil && others.Here {
			return err
		}
		createErr := c.env.cfg.Forward.Create(ctx, name, params.Publisher)
		if createErr != nil {
			c.env.log.Warn("cannot find or create the topic of a subscription", obs.KeyRemote, c.remote, obs.KeyTopic, name, obs.KeyError, createErr)
		}
		if t, missing := c.env.broker.Topic(op.Topic); missing == nil && !t.Uncreated() {
			return nil
		}
		if createErr != nil {
			return err
		}
		// The loaddistributor that lists brokers may learn of the new topic later than the
		// loaddistributor that created it.
		for range findAttempts {
			sub, err = c.env.cfg.Forward.Subscribe(ctx, name, string(op.Channel), params, notify)
			if !forward.IsUnknown(err) || !clock.Sleep(ctx, findPause) {
				break
			}
		}
		return err
	})
	if forward.IsUnknown(err) {
		err = broker.ErrUnknownTopic
	}
	return sub, err
}

// forwardIdentity returns the identity of a publisher (target.as) for other brokers.
func (c *client) forwardIdentity(as string) forward.Publisher {
	if as != "" {
		return forward.Publisher{ClientID: as, Identity: DeviceIdentity(as), Host: hostOf(c.remote)}
	}
	return forward.Publisher{ClientID: c.peer.Identity().ClientID, Identity: c.identity(), Host: hostOf(c.remote)}
}

// takeSent returns and clears the current forwarded publish.
func (f *forwarding) takeSent() *forward.Pending {
	sent := f.sent
	f.sent = nil
	return sent
}

func (c *client) settleForwarded() {
	if c.pubs.unanswered {
		c.settle()
		// A topic is in order of arrival, so later publishes must not be older than the forwarded
		// publishes.
		c.pubs.notBefore, c.wall = clock.Mono(), clock.Wall()
	}
}

func (p *publisher) abandonForwarded() {
	for _, u := range p.unsettled {
		if u.sent != nil {
			u.sent.Abandon()
		}
	}
	p.unsettled = nil
}

// endForwarding closes the connection's publishers at other brokers. The next forward opens them
// with the client's identity at that time.
func (f *forwarding) endForwarding() {
	for _, l := range f.lines {
		l.Close()
	}
	f.lines = nil
}

// authenticateBroker carries out AUTH for a broker that forwards another client's publishes.
func (c *client) authenticateBroker(op *session.Op) error {
	o, err := c.env.cfg.Forward.Origin(op.Body)
	if err != nil {
		return wire.Wrap(wire.CodeAuthFailed, "AUTH failed", err)
	}
	s, ok := c.sess.(*session.Session)
	prefixed := ok && o.Attributes
	reply, err := json.Marshal(origin.Answer{Identity: o.ID, Attributes: prefixed})
	if err != nil {
		return fmt.Errorf("encode the answer to AUTH: %w", err)
	}
	if op.Reply, c.pubs.origin, c.pubs.prefixed = reply, &o, prefixed; prefixed {
		s.UseAttributes()
		c.encoder = attributed{}
	}
	c.stats.origin.Store(&o)
	c.pubs.leaveTopics() // the publishers have the old identity
	return nil
}

// attributed encodes messages for a broker that relays them with their attributes.
type attributed struct{}

func (attributed) AppendMessage(dst []byte, m *wire.Message, attribute []byte) []byte {
	return wire.AppendAttributed(dst, m, attribute)
}

// DeviceIdentity returns the identity of a publisher that a rule of MQTT names.
func DeviceIdentity(as string) police.Identity { return police.Identity{Kind: "device", ID: as} }
