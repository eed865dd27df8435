package console

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// maxPeek is the maximum number of messages of one broker on a page.
const maxPeek = 100

type peeked struct {
	Broker    string
	ID        string `json:"id"`
	Offset    uint64 `json:"offset"`
	Timestamp int64  `json:"timestamp"`
	Attempts  uint16 `json:"attempts"`
	Body      []byte `json:"body"`
}

// Text formats the body for people: JSON with a line for each field.
func (p peeked) Text() string {
	body, cut := p.Body, ""
	if start := bytes.TrimLeft(body, " \t\r\n"); len(body) <= maxPeeked && len(start) > 0 && (start[0] == '{' || start[0] == '[') {
		var lines bytes.Buffer
		if json.Indent(&lines, body, "", "  ") == nil {
			return lines.String()
		}
	}
	if len(body) > maxPeeked {
		body, cut = body[:maxPeeked], fmt.Sprintf("… (%d bytes in all)", len(p.Body))
		for len(body) > 0 && !utf8.Valid(body) && len(body) > maxPeeked-utf8.UTFMax {
			body = body[:len(body)-1]
		}
	}
	if !utf8.Valid(body) {
		return fmt.Sprintf("% x%s", body[:min(len(body), 512)], cut)
	}
	return string(body) + cut
}

// Published formats the time of publication, in UTC.
func (p peeked) Published() string {
	return time.Unix(0, p.Timestamp).UTC().Format("2006-01-02 15:04:05.000")
}

type peekData struct {
	Topic, Channel string
	Count          int    // of each broker
	Filter         string // part of the bodies
	Messages       []peeked
	Looked         int // messages before the filter
	Trouble        []string
}

// peek shows the next messages of a channel on each of its brokers.
func (c *Console) peek(ctx context.Context, q url.Values, u user) (view, error) {
	d := peekData{Topic: q.Get("topic"), Channel: q.Get("channel"), Count: 10, Filter: q.Get("filter")}
	if text := q.Get("count"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > maxPeek {
			return view{}, &problem{http.StatusBadRequest, fmt.Sprintf("The count %.20q is not a number from 1 to %d.", text, maxPeek)}
		}
		d.Count = n
	}
	brokers, _, err := c.requester.holders(ctx, d.Topic)
	if err != nil {
		return view{}, err
	}
	ask := url.Values{"topic": {d.Topic}, "channel": {d.Channel}, "count": {strconv.Itoa(d.Count)}}
	type next struct {
		Messages []peeked `json:"messages"`
		err      error
	}
	for _, answer := range each(brokers, func(id, address string) (r next) {
		var body []byte
		if body, r.err = c.requester.ask(ctx, c.requester.transport, http.MethodGet, address, "/channel/peek?"+ask.Encode()); r.err == nil {
			r.err = decode(address, body, &r)
		}
		for i := range r.Messages {
			r.Messages[i].Broker = id
		}
		return r
	}) {
		if answer.err != nil {
			d.Trouble = append(d.Trouble, answer.err.Error())
		}
		d.Looked += len(answer.Messages)
		for _, m := range answer.Messages {
			if strings.Contains(string(m.Body), d.Filter) {
				d.Messages = append(d.Messages, m)
			}
		}
	}
	c.logAction("peek", u, nil, "topic", d.Topic, "channel", d.Channel)
	crumbs := append(crumbs(c.clustered(), d.Topic), link{d.Channel, query("/ui/channel", "topic", d.Topic, "channel", d.Channel)})
	return view{Template: "peek", Title: "Next messages of " + d.Channel, Crumbs: crumbs, Data: d}, nil
}
