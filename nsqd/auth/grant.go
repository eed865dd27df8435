package auth

import (
	"fmt"
	"regexp"
	"time"

	"github.com/srtm-io/srtm/internal/bounded"
	"github.com/srtm-io/srtm/internal/faults"
)

// Permission is an action of a client.
type Permission uint8

// The permissions of the protocol.
const (
	Publish   Permission = 1 << iota // PUB, MPUB, DPUB
	Subscribe                        // SUB
)

// Grant is an auth server's answer about one client. Immutable.
type Grant struct {
	Identity    string
	IdentityURL string
	TTL         time.Duration // > 0

	rules []rule
}

// rule permits actions on matching topics and channels.
type rule struct {
	permissions Permission // a set
	topic       *regexp.Regexp
	channels    []*regexp.Regexp
}

// Rules returns the number of authorizations in the answer.
func (g *Grant) Rules() int { return len(g.rules) }

// Allows reports whether a rule permits p on the topic and the channel. For publishing the
// channel is empty, and must match too: the channels [".*"] match the empty channel, the channels
// ["archive"] do not.
//
// Patterns without anchors match anywhere in a name: "log" matches "catalog", "^log$" does not.
func (g *Grant) Allows(p Permission, topic, channel string) bool {
	for i := range g.rules {
		if g.rules[i].allows(p, topic, channel) {
			return true
		}
	}
	return false
}

func (r *rule) allows(p Permission, topic, channel string) bool {
	if r.permissions&p == 0 || !r.topic.MatchString(topic) {
		return false
	}
	for _, c := range r.channels {
		if c.MatchString(channel) {
			return true
		}
	}
	return false
}

// maxTTL keeps a TTL from the network inside time.Duration.
const maxTTL = 10 * 365 * 24 * time.Hour

// answer is the JSON of the auth server.
//
//	{"ttl": 3600, "identity": "username", "identity_url": "https://....",
//	 "authorizations": [{"permissions": ["subscribe", "publish"], "topic": ".*", "channels": [".*"]}]}
type answer struct {
	TTL            int64  `json:"ttl"` // seconds
	Identity       string `json:"identity"`
	IdentityURL    string `json:"identity_url"`
	Authorizations []struct {
		Permissions []string `json:"permissions"`
		Topic       string   `json:"topic"`
		Channels    []string `json:"channels"`
	} `json:"authorizations"`
}

// ParseAnswer parses an auth server's answer, or returns all of its problems. An answer that
// grants nothing is valid.
func ParseAnswer(body []byte) (*Grant, error) {
	var a answer
	if err := bounded.Decode(body, bounded.MaxElements, &a); err != nil {
		return nil, fmt.Errorf("auth server's answer: %w", err)
	}
	var errs faults.List
	errs.If(a.TTL <= 0, "ttl of %d seconds is not positive", a.TTL)
	g := &Grant{
		Identity:    a.Identity,
		IdentityURL: a.IdentityURL,
		TTL:         time.Duration(min(a.TTL, int64(maxTTL/time.Second))) * time.Second,
		rules:       make([]rule, len(a.Authorizations)),
	}
	pattern := func(i int, field, text string) *regexp.Regexp {
		re, err := regexp.Compile(text)
		errs.If(err != nil, "authorization %d: %s: %w", i, field, err)
		return re
	}
	for i, authorization := range a.Authorizations {
		r := &g.rules[i]
		for _, p := range authorization.Permissions {
			switch p {
			case "publish":
				r.permissions |= Publish
			case "subscribe":
				r.permissions |= Subscribe
			default:
				errs.Add(fmt.Errorf("authorization %d: permission %q is neither publish nor subscribe", i, p))
			}
		}
		r.topic = pattern(i, "topic", authorization.Topic)
		for _, c := range authorization.Channels {
			r.channels = append(r.channels, pattern(i, "channel", c))
		}
	}
	if err := errs.Err(); err != nil {
		return nil, fmt.Errorf("auth server's answer: %w", err)
	}
	return g, nil
}
