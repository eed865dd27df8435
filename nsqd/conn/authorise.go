package conn

import (
	"context"
	"encoding/json"
	"fmt"
	"net"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/nsq/origin"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/auth"
)

// Authoriser decides what clients may do. auth.Servers implements it.
type Authoriser interface {
	Ask(context.Context, auth.Query) (*auth.Grant, error)
}

// credentials are a client's secret and its current grant.
type credentials struct {
	secret  string
	grant   *auth.Grant
	expires mono.Time
}

func (c *client) authenticate(op *session.Op) error {
	if c.env.cfg.Forward != nil && origin.Is(op.Body) {
		return c.authenticateBroker(op)
	}
	c.cred.secret = string(op.Body)
	if err := c.ask(); err != nil {
		return err
	}
	g := c.cred.grant
	if g.Rules() == 0 {
		return wire.NewError(wire.CodeUnauthorized, "AUTH no authorizations found")
	}
	reply, err := json.Marshal(struct {
		Identity    string `json:"identity"`
		IdentityURL string `json:"identity_url"`
		Permissions int    `json:"permission_count"`
	}{g.Identity, g.IdentityURL, g.Rules()})
	if err != nil {
		return fmt.Errorf("encode the answer to AUTH: %w", err)
	}
	op.Reply = reply
	return nil
}

// ask requests a new grant. The reader waits for it: the client's input stays in the socket, and
// heartbeats wait. The auth servers' timeouts keep the wait short.
func (c *client) ask() error {
	q := auth.NewQuery(c.remote, c.cred.secret, c.stats.tls.Load())
	var g *auth.Grant
	err := c.withExtraDescriptor(func() error {
		return c.interruptibly(func(ctx context.Context) (err error) {
			g, err = c.env.cfg.Auth.Ask(ctx, q)
			return err
		})
	})
	if err != nil {
		c.env.log.Warn("cannot authorise the client", obs.KeyRemote, c.remote, obs.KeyError, err)
		return wire.Wrap(wire.CodeAuthFailed, "AUTH failed", err)
	}
	c.cred.grant, c.cred.expires = g, clock.Mono().Add(g.TTL)
	c.stats.grant.Store(g)
	c.pubs.leaveTopics() // the next publish checks the new grant
	return nil
}

// hostOf returns the IP address of a peer's address, or "" for a Unix socket.
func hostOf(remote string) string {
	host, _, _ := net.SplitHostPort(remote)
	return host
}

// permit returns nil if the client may carry out op now. It renews an expired grant. A publish to a
// topic in targets needs no check: the grant has not changed since the first publish.
func (c *client) permit(op *session.Op, now mono.Time) error {
	if c.env.cfg.Auth == nil || c.pubs.origin != nil { // the forwarding broker has checked the client
		return nil
	}
	if !now.Before(c.cred.expires) {
		if err := c.ask(); err != nil {
			return err
		}
	}
	p := auth.Publish
	if op.Kind == session.OpSub {
		p = auth.Subscribe
	} else if c.pubs.target(op.Topic, publisherOf(op)) != nil {
		return nil
	}
	if !c.cred.grant.Allows(p, string(op.Topic), string(op.Channel)) {
		return wire.NewError(wire.CodeUnauthorized, fmt.Sprintf("AUTH failed for %v on %q %q", op.Kind, op.Topic, op.Channel))
	}
	return nil
}
