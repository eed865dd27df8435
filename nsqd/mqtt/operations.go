package mqtt

import (
	"context"
	"crypto/rand"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/mqtt/session"
	nsq "github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
)

// Run carries out an operation that only MQTT has, before its Answer. It may block, until ctx ends.
func (c *Client) Run(ctx context.Context, op *nsq.Op) error {
	switch op.Kind {
	case nsq.OpConnect:
		return c.connect(ctx, op.MQTT.Connect)
	case nsq.OpSubscribe:
		if op.MQTT.Refusal != "" {
			c.server.log.Info("subscription refused", "client_id", c.entry.id, obs.KeyReason, op.MQTT.Refusal)
		}
		c.subscribe(op)
	case nsq.OpUnsubscribe:
		c.stale.Store(true) // after the Answer the filters are gone
		return c.keep(c.Session.After(op))
	case nsq.OpDisconnect:
		return c.leave(op.MQTT)
	}
	return nil
}

// connect accepts a client: connect takes over the client id, and continues or replaces the kept session.
func (c *Client) connect(ctx context.Context, in *nsq.Connect) error {
	if in.ClientID == "" {
		in.ClientID = "auto-" + rand.Text()
	}
	if err := c.conn.Authenticate(secret(in)); err != nil {
		return err
	}
	if w := in.Will; w != nil {
		if err := c.conn.Permit(w.Topic); err != nil {
			return err
		}
		if err := c.server.sessions.reserveWill(w); err != nil {
			return err
		}
	}
	owner := ""
	if is := c.conn.Identity(); is.Kind == "auth" || is.Kind == "cert" {
		owner = is.Kind + ":" + is.ID
	}
	e, err := c.server.sessions.hold(ctx, in.ClientID, owner, c)
	if err != nil {
		c.server.sessions.releaseWill(in.Will)
		return err
	}
	c.entry, c.redirects = e, in.Redirect
	c.will.Store(in.Will)
	c.record = record{ClientID: in.ClientID, Owner: owner, Expiry: in.Expiry, Will: in.Will}
	if err := c.resume(in); err != nil {
		c.entry = nil
		c.server.sessions.releaseWill(c.will.Swap(nil))
		c.server.sessions.leave(e, e.expires, nil, 0)
		return err
	}
	c.stale.Store(len(c.record.Filters) > 0)
	return nil
}

// resume continues or ends the kept session. Then resume stores the new session, if that session is to be kept.
func (c *Client) resume(in *nsq.Connect) error {
	s, e := c.server, c.entry
	old := e.will
	e.will = nil
	if old != nil && in.CleanStart {
		s.publishWill(s.sessions.ctx, e.id, e.owner, old)
	} else {
		s.sessions.releaseWill(old)
	}
	if e.stored {
		kept, err := s.sessions.store.load(e.id)
		switch {
		case err != nil:
			return &session.Error{Reason: session.ServerUnavailable, Text: "the session cannot be read now", Cause: err}
		case in.CleanStart:
			if s.endSession(e, true) > 0 {
				return &session.Error{Reason: session.ServerUnavailable, Text: "the old session cannot be ended now"}
			}
		case kept != nil:
			in.Present = true
			c.record.Filters = kept.Filters
			c.Session.Restore(kept.Filters) // without a source there is no writer
		}
	}
	if in.Expiry == 0 && !in.Present {
		return nil
	}
	return s.sessions.save(e, &c.record)
}

// secret returns what the auth server gets: the password, or the user name of a client without password.
func secret(in *nsq.Connect) string {
	if len(in.Password) > 0 {
		return string(in.Password)
	}
	return in.UserName
}

// keep makes the session with the given filters durable, if the session is kept.
func (c *Client) keep(filters []nsq.Filter) error {
	c.record.Filters = filters
	if !c.entry.stored {
		return nil
	}
	err := c.server.sessions.save(c.entry, &c.record)
	if err != nil {
		c.server.log.Warn("cannot store an MQTT session", "client_id", c.entry.id, obs.KeyError, err)
	}
	return err
}

// subscribeWithin bounds the wait of a SUBSCRIBE for brokers that do not answer.
const subscribeWithin = time.Second

// subscribe opens the sources of filters, and sets the reasons of failures.
func (c *Client) subscribe(op *nsq.Op) {
	until := c.server.now().Add(subscribeWithin)
	filters := op.MQTT.Filters
	for i := range filters {
		f := &filters[i]
		for _, topic := range f.Topics {
			if f.Reason >= byte(session.Unspecified) {
				break
			}
			if err := c.open(topic, f, until); err != nil {
				f.Reason = byte(session.ReasonOf(err))
				c.server.metrics.refused.WithLabelValues("subscription").Inc()
				c.server.log.Debug("subscription refused", obs.KeyTopic, topic, obs.KeyChannel, f.Channel, "client_id", c.entry.id, obs.KeyError, err)
			}
		}
	}
	if err := c.keep(c.Session.After(op)); err != nil {
		for i := range filters {
			filters[i].Reason = max(filters[i].Reason, byte(session.ReasonOf(err)))
		}
	}
	c.stale.Store(true) // a filter may have replaced another filter
}

// open opens the sources of a filter's topic, unless they are open. If the session is kept, open claims the
// channel. A claim that fails is repeated and is no error: only the end of a session at another broker needs
// the claim.
func (c *Client) open(topic string, f *nsq.Filter, until mono.Time) error {
	again, err := c.Sources.open(topic, f.Channel, until)
	if again > 0 {
		c.refreshAfter(again)
	}
	claim := topic + " " + f.Channel
	if err != nil || f.Share != "" || wire.Ephemeral(f.Channel) || slices.Contains(c.claimed, claim) {
		return err
	}
	err = c.server.sessions.request(func(ctx context.Context) error { return c.server.cfg.ClaimChannel(ctx, topic, f.Channel) })
	if err != nil {
		c.server.log.Debug("cannot claim the channel of an MQTT client; retrying", obs.KeyTopic, topic, obs.KeyChannel, f.Channel, "client_id", c.entry.id, obs.KeyError, err)
		c.refreshAfter(claimAfter)
		return nil
	}
	c.claimed = append(c.claimed, claim)
	return nil
}

// leave carries out the client's DISCONNECT.
func (c *Client) leave(in *nsq.Extra) error {
	c.record.Expiry = in.SessionExpiry
	if !in.PublishWill {
		c.server.sessions.releaseWill(c.will.Swap(nil))
		c.record.Will = nil
	}
	if c.record.Expiry > 0 {
		_ = c.keep(c.record.Filters) // logged; the client has left
	}
	return nil
}

// Stale reports whether the sources may differ from the filters, so that Refresh is due.
func (c *Client) Stale() bool { return c.stale.Load() }

// refresh makes the driver call Refresh. Any goroutine may call refresh.
func (c *Client) refresh() {
	c.stale.Store(true)
	c.conn.Notify()
}

// refreshAfter makes the driver call Refresh after a pause, or earlier if an earlier call is due.
func (c *Client) refreshAfter(pause time.Duration) {
	at := c.server.now().Add(pause)
	if c.retry != nil && c.retryAt <= at {
		return
	}
	c.endRetry()
	c.retry, c.retryAt = time.AfterFunc(pause, c.refresh), at
}

// endRetry forgets the call of refreshAfter.
func (c *Client) endRetry() {
	if c.retry != nil {
		c.retry.Stop()
		c.retry = nil
	}
}

// Refresh opens the sources that the filters need, and closes the others. It may block.
func (c *Client) Refresh() {
	if !c.stale.Swap(false) {
		return
	}
	c.endRetry()
	filters := c.Session.Subscriptions()
	wanted := func(topic, channel string) bool {
		return slices.ContainsFunc(filters, func(f nsq.Filter) bool { return f.Channel == channel && slices.Contains(f.Topics, topic) })
	}
	c.Sources.retain(wanted)
	c.claimed = slices.DeleteFunc(c.claimed, func(claim string) bool {
		topic, channel, _ := strings.Cut(claim, " ")
		return !wanted(topic, channel)
	})
	for _, f := range filters {
		for _, topic := range f.Topics {
			err := c.open(topic, &f, c.server.now())
			if errors.Is(err, broker.ErrDraining) {
				return // the connection ends, too
			}
			if err != nil {
				c.refreshAfter(reopenAfter)
				c.server.log.Warn("cannot open the subscription of an MQTT client; retrying", obs.KeyTopic, topic, obs.KeyChannel, f.Channel, "client_id", c.entry.id, obs.KeyError, err)
			}
		}
	}
}

// Close releases what the client has in the broker. It does not block.
func (c *Client) Close() {
	c.Sources.Close()
	c.endRetry()
	e, s := c.entry, c.server
	if e == nil {
		return
	}
	c.entry = nil
	now := s.now()
	e.left = now
	will, willAt := c.will.Swap(nil), mono.Time(0)
	if will != nil {
		willAt = now.Add(min(will.Delay, c.record.Expiry))
	}
	s.sessions.leave(e, now.Add(c.record.Expiry), will, willAt)
}
