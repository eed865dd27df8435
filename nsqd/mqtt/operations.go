package mqtt

import (
	"context"
	"crypto/rand"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/mqtt/session"
	nsq "github.com/srtm-io/srtm/nsq/session"
)

// Run carries out an operation that only MQTT has, before its Answer. It may block, until ctx ends.
func (c *Client) Run(ctx context.Context, op *nsq.Op) error {
	switch op.Kind {
	case nsq.OpConnect:
		return c.connect(ctx, op.MQTT.Connect)
	case nsq.OpSubscribe:
		c.subscribe(op.MQTT.Filters)
	case nsq.OpUnsubscribe:
		c.stale.Store(true) // after the Answer the filters are gone
	}
	return nil
}

// connect accepts a client.
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
	}
	c.clientID = in.ClientID
	return c.server.clients.enter(ctx, in.ClientID, c)
}

// secret returns what the auth server gets: the password, or the user name of a client without password.
func secret(in *nsq.Connect) string {
	if len(in.Password) > 0 {
		return string(in.Password)
	}
	return in.UserName
}

// subscribe opens the sources of filters, and sets the reasons of failures.
func (c *Client) subscribe(filters []nsq.Filter) {
	for i := range filters {
		f := &filters[i]
		for _, topic := range f.Topics {
			if f.Reason >= byte(session.Unspecified) {
				break
			}
			if err := c.Sources.open(topic, f.Channel); err != nil {
				f.Reason = byte(session.ReasonOf(err))
				c.server.log.Info("subscription refused", obs.KeyTopic, topic, obs.KeyChannel, f.Channel, "client_id", c.clientID, obs.KeyError, err)
			}
		}
	}
	c.stale.Store(true) // a filter may have replaced another filter
}

// Stale reports whether the sources may differ from the filters, so that Refresh is due.
func (c *Client) Stale() bool { return c.stale.Load() }

// refresh makes the driver call Refresh. Any goroutine may call refresh.
func (c *Client) refresh() {
	c.stale.Store(true)
	c.conn.Notify()
}

// Refresh opens the sources that the filters need, and closes the others. It may block.
func (c *Client) Refresh() {
	if !c.stale.Swap(false) {
		return
	}
	c.mu.Lock()
	filters := slices.Clone(c.sess.Subscriptions())
	c.mu.Unlock()
	c.Sources.retain(func(topic, channel string) bool {
		return slices.ContainsFunc(filters, func(f nsq.Filter) bool { return f.Channel == channel && slices.Contains(f.Topics, topic) })
	})
	for _, f := range filters {
		for _, topic := range f.Topics {
			if err := c.Sources.open(topic, f.Channel); err != nil {
				c.server.log.Warn("cannot open the subscription of an MQTT client again; retrying", obs.KeyTopic, topic, obs.KeyChannel, f.Channel, "client_id", c.clientID, obs.KeyError, err)
				c.refreshLater()
			}
		}
	}
}

// refreshLater makes the driver call Refresh again after a pause.
func (c *Client) refreshLater() { time.AfterFunc(reopenAfter, c.refresh) }

// Close releases what the client has in the broker.
func (c *Client) Close() {
	c.Sources.Close()
	if c.clientID != "" {
		c.server.clients.leave(c.clientID, c)
	}
}
