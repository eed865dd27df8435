package conn

import (
	"context"
	"errors"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	mqttsession "github.com/srtm-io/srtm/mqtt/session"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/auth"
	"github.com/srtm-io/srtm/nsqd/forward"
	"github.com/srtm-io/srtm/nsqd/mqtt"
	"github.com/srtm-io/srtm/pacing/police"
)

// Protocol is the protocol of a listener's clients.
type Protocol uint8

// Protocols.
const (
	NSQ   Protocol = iota
	MQTT           // 3.1.1 or 5.0
	MQTTS          // MQTT over TLS from the first byte
)

// newMQTTClient returns an MQTT client that has no driver yet.
func newMQTTClient(e *env, remote string, secure bool) *client {
	c := &client{env: e, remote: remote, awaitsTLS: secure, stats: connStats{connected: time.Now()}}
	c.mqtt = e.cfg.MQTT.NewClient(mqttConn{c}, secure, clock.Mono())
	c.sess, c.peer = c.mqtt, c.mqtt.Session
	return c
}

// mqttConn is a client's connection, for package nsqd/mqtt.
type mqttConn struct{ c *client }

// Authenticate implements mqtt.Connection.
func (m mqttConn) Authenticate(secret string) error {
	if m.c.env.cfg.Auth == nil {
		return nil
	}
	m.c.cred.secret = secret
	err := m.c.ask()
	switch {
	case errors.Is(err, auth.ErrRefused):
		return &mqttsession.Error{Reason: mqttsession.BadUserOrPassword, Text: "the auth server refuses the user name or the password", Cause: err}
	case err != nil:
		return err
	}
	if m.c.cred.grant.Rules() == 0 {
		return wire.NewError(wire.CodeUnauthorized, "the auth server permits nothing")
	}
	return nil
}

// Permit implements mqtt.Connection.
func (m mqttConn) Permit(topic string) error {
	return m.c.permit(&session.Op{Kind: session.OpPub, Topic: []byte(topic)}, clock.Mono())
}

// Subscribe implements mqtt.Connection.
func (m mqttConn) Subscribe(topic, channel string, notify func()) (mqtt.Subscription, error) {
	op := &session.Op{Kind: session.OpSub, Topic: []byte(topic), Channel: []byte(channel)}
	if err := m.c.permit(op, clock.Mono()); err != nil {
		return nil, err
	}
	sub, err := subscribeHere(m.c, op, notify)
	switch {
	case err == nil:
		return sub, nil
	case m.c.shouldForward(err):
		return nil, nil
	}
	return nil, err
}

// Relay implements mqtt.Connection.
func (m mqttConn) Relay(topic, channel string, here bool, until mono.Time, notify func()) (mqtt.Subscription, mqtt.Others, error) {
	if m.c.env.cfg.Forward == nil {
		return nil, nil, nil
	}
	op := &session.Op{Kind: session.OpSub, Topic: []byte(topic), Channel: []byte(channel)}
	sub, err := m.c.relay(op, &forward.Others{Here: here, Until: until}, notify)
	if sub == nil {
		return nil, nil, err
	}
	return sub, sub, err
}

// Identity implements mqtt.Connection.
func (m mqttConn) Identity() police.Identity { return m.c.identity() }

// Notify implements mqtt.Connection.
func (m mqttConn) Notify() { m.c.notifier()() }

// Quit implements mqtt.Connection.
func (m mqttConn) Quit() { m.c.quit() }

// run carries out an operation that only MQTT has.
func (m mqttConn) run(op *session.Op) error {
	c := m.c
	err := c.interruptibly(func(ctx context.Context) error { return c.mqtt.Run(ctx, op) })
	if err == nil && op.Kind == session.OpConnect {
		id := c.peer.Identity()
		id.ClientID, id.Hostname = op.MQTT.Connect.ClientID, hostOf(c.remote)
		c.stats.identity.Store(&id)
	}
	return err
}

// refresh opens and closes the client's subscriptions, after its filters or the rules have changed.
// Requires: the driver may block.
func (m mqttConn) refresh() error {
	c := m.c
	c.mqtt.Refresh()
	topic, channel := c.mqtt.Sources.First()
	if topic == "" {
		return nil
	}
	first := c.sub == nil
	c.sub, c.deliveries = &c.mqtt.Sources, &c.mqtt.Sources
	c.stats.sub.Store(&subscribed{c.deliveries, topic, channel})
	c.stats.state.Store(int32(StateSubscribed))
	if first {
		return c.driver.subscribed()
	}
	return nil
}

// logEnd logs the end of an MQTT session. The broker's own reasons and lost devices are no faults.
func (m mqttConn) logEnd(e *mqttsession.Error) {
	c := m.c
	switch e.Reason {
	case mqttsession.ShuttingDown, mqttsession.TakenOver, mqttsession.KeepAliveTimeout, mqttsession.UseAnotherServer:
		c.env.log.Debug("connection ended", obs.KeyRemote, c.remote, obs.KeyError, e)
		return
	}
	c.env.faults.Add(1)
	c.env.log.Warn("connection closed", obs.KeyRemote, c.remote, "client_id", c.peer.Identity().ClientID, obs.KeyError, e)
}

const (
	// retryAfter is the pause before a publish to a full topic is repeated.
	retryAfter = 20 * time.Millisecond
	// maxRetryAfter is the maximum pause before a publish over its limit is repeated.
	maxRetryAfter = 250 * time.Millisecond
)

// waitToRepeat waits before a refused publish is repeated. It returns false if the connection ends.
func (m mqttConn) waitToRepeat(refused error) (again bool) {
	c := m.c
	pause := retryAfter
	if e, ok := errors.AsType[*wire.Error](refused); ok {
		if after, ok := e.RetryAfter(); ok {
			pause = min(max(after, time.Millisecond), maxRetryAfter)
		}
	}
	_ = c.interruptibly(func(ctx context.Context) error {
		again = clock.Sleep(ctx, pause) && !c.quitting.Load() && !c.stopping.Load()
		return nil
	})
	c.mqtt.Session.Heard(clock.Mono())
	return again
}
