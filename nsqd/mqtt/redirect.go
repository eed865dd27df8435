package mqtt

import (
	"context"
	"strconv"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/mqtt/session"
)

// Home is the first publisher of a connection whose client follows server references. The publisher's broker
// is the home of the connection. Other publishers and topics do not count, because other brokers may own them.
type Home struct {
	Topic     string
	As        string // the publisher that a rule names; "": the client
	Publisher string // the control plane's name
	Target    string // address of the broker that got the last publish; "": this broker
	// Find returns the MQTT address of the publisher's broker, HOST:PORT. "": the client stays.
	Find func(context.Context) (address string, err error)
}

// SeeksHome reports whether to call SetHome after a publish to target, see Home. The client follows server
// references, and has published for the first time, or target is another broker than before. c may be nil: NSQ.
func (c *Client) SeeksHome(topic, as, target string) bool {
	if c == nil || !c.redirects {
		return false
	}
	h := c.home.Load()
	return h == nil || h.Topic == topic && h.As == as && h.Target != target
}

// SetHome sets the home of the connection. If the home is another broker, the client gets a server reference,
// after the answers to its publishes.
func (c *Client) SetHome(h Home) {
	c.home.Store(&h)
	c.goHome(&h)
}

// FollowHome searches the broker again if the placement of the home's publisher has changed. It returns false
// if the home is of another topic or publisher. Any goroutine may call FollowHome.
func (c *Client) FollowHome(topic string, publishers map[string]bool) bool {
	h := c.home.Load()
	if h == nil || h.Topic != topic || !publishers[h.Publisher] {
		return false
	}
	c.goHome(h)
	return true
}

func (c *Client) goHome(h *Home) {
	s := c.server
	s.sessions.spawn(func() {
		address, err := h.Find(s.sessions.ctx)
		id := c.Session.Identity().ClientID
		switch {
		case err != nil:
			s.log.Debug("cannot find the broker of an MQTT client; the client stays", "client_id", id, obs.KeyTopic, h.Topic, obs.KeyError, err)
		case address != "" && s.sessions.mayRedirect(id, s.now()):
			s.metrics.redirects.Inc()
			c.end(&session.Error{
				Reason: session.UseAnotherServer, ServerReference: address,
				Text: "publishers of topic " + strconv.Quote(h.Topic) + " belong to another broker",
			})
		}
	})
}

const (
	// redirectPause is the time in which the broker redirects a client at most once. Without the pause, two
	// brokers could send a client back and forth: if the client has a publisher on each, or if their
	// loaddistributors disagree for a moment. Then the second broker forwards.
	redirectPause = time.Minute
	// maxRedirected is the maximum number of clients to redirect within redirectPause.
	maxRedirected = 100_000
)

// redirected has the clients that the broker has redirected in this pause and in the pause before.
type redirected struct {
	now, before map[string]bool
	start       mono.Time // of now
}

// mayRedirect reports whether to redirect a client, and counts the redirection.
func (ss *sessions) mayRedirect(id string, now mono.Time) bool {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	r := &ss.mu.redirected
	if age := now.Sub(r.start); r.now == nil || age >= 2*redirectPause {
		*r = redirected{now: map[string]bool{}, start: now}
	} else if age >= redirectPause {
		*r = redirected{now: map[string]bool{}, before: r.now, start: now}
	}
	if r.now[id] || r.before[id] || len(r.now) >= maxRedirected {
		return false
	}
	r.now[id] = true
	return true
}
