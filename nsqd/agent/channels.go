package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
)

// A channel exists on all brokers of its topic. When a client changes a channel here, the agent sends a
// ChannelRequest to the control plane. The control plane's decisions arrive as ChannelOrders
// (orders.go).

// How long a client waits for the control plane: a client that creates a channel, and a client that
// pauses, unpauses or deletes a channel.
const (
	confirmWait = time.Second
	changeWait  = 5 * time.Second
)

// Reasons why the control plane has not carried out a request.
var (
	// ErrDisconnected: no session with the control plane.
	ErrDisconnected = errors.New("the control plane is not connected")
	// ErrUnanswered: the control plane or another broker of the topic has not answered in time. The
	// change may still be made.
	ErrUnanswered = errors.New("the control plane has not answered in time")
	// ErrTopicUnknown: the control plane does not have the topic on this broker.
	ErrTopicUnknown = errors.New("the control plane does not have the topic on this broker")
	// ErrChannelUnknown: the topic has no such channel.
	ErrChannelUnknown = errors.New("no such channel in the topic")
	// ErrChannelInUse: the channel has consumers, or another broker has claimed the channel.
	ErrChannelInUse = errors.New("the channel has consumers, or a session at another broker")
	// ErrTooManyChannels: the topic has the maximum number of channels.
	ErrTooManyChannels = errors.New("the topic has its maximum number of channels")
)

const (
	// requestsPerTopic is the maximum number of open creation requests for one topic. Further channels
	// wait, and then share a request.
	requestsPerTopic = 8
	// requestRetry is the delay before requestChannels tries again after it found the session's queue
	// full.
	requestRetry = 10 * time.Millisecond
)

type topicChannel struct{ topic, channel string }

// answer is the control plane's answer to a request, present or still to come. All clients that wait
// for the same answer share it.
type answer struct {
	created uint64
	done    chan struct{} // closed when the answer arrives
	err     error         // set before done is closed
}

func (q *answer) end(err error) {
	q.err = err
	close(q.done)
}

// channelRequest is a request without an answer yet.
type channelRequest struct {
	topic  string
	names  []string // channels to create; nil: another change
	waiter *answer
}

// channels has the owner's requests about channels. Each session starts empty: PrepareTopic exchanges
// all channels in both directions.
type channels struct {
	requests uint64                     // number of the last request
	open     map[uint64]*channelRequest // requests without an answer, by number
	perTopic map[string]int             // number of creation requests in open, by topic
	creating map[topicChannel]*answer   // channels that clients create: the names in open and in waiting
	waiting  map[string][]string        // names that are in no request yet, by topic
	retry    *time.Timer                // to send waiting again
}

func newChannels() channels {
	c := channels{retry: time.NewTimer(time.Hour)}
	c.reset()
	return c
}

func (c *channels) reset() {
	c.open, c.perTopic, c.creating, c.waiting = map[uint64]*channelRequest{}, map[string]int{}, map[topicChannel]*answer{}, map[string][]string{}
}

// Confirm reports a channel that a client has created or found here to the control plane. created is
// the catalog version of the creation, as the control plane sent it last; 0: none. Confirm returns when
// the control plane and all connected brokers of the topic have the channel. Without a session Confirm
// returns at once; with a session Confirm waits at most a second. After an error other than
// ErrTooManyChannels the channel may be missing on other brokers.
func (a *Agent) Confirm(topic, channel string, created uint64) error {
	if !a.connected.Load() {
		return ErrDisconnected
	}
	ctx, cancel := context.WithTimeout(context.Background(), confirmWait)
	defer cancel()
	err := a.await(ctx, func(o *owner) *answer { return o.confirm(topicChannel{topic, channel}, created) })
	result := "unsettled"
	switch {
	case err == nil:
		result = "settled"
	case errors.Is(err, ErrTooManyChannels):
		result = "refused"
	case errors.Is(err, ErrUnanswered):
		a.cfg.Log.Warn("a client may use a channel that not all brokers of the topic are known to have", obs.KeyTopic, topic, obs.KeyChannel, channel, obs.KeyError, err)
	}
	a.metrics.channels.WithLabelValues(result).Inc()
	return err
}

// ChangeChannel requests that the control plane pauses, unpauses, claims or deletes a channel on all brokers of its
// topic. ChangeChannel returns when the connected brokers have done so.
// Errors: ErrDisconnected, ErrUnanswered, ErrTopicUnknown, ErrChannelUnknown, ErrChannelInUse, or an error
// from the control plane.
func (a *Agent) ChangeChannel(ctx context.Context, topic, channel string, change srtmv1.ChannelChange) error {
	if !a.connected.Load() {
		return ErrDisconnected
	}
	ctx, cancel := context.WithTimeout(ctx, changeWait)
	defer cancel()
	return a.await(ctx, func(o *owner) *answer { return o.changeChannel(topic, channel, change) })
}

// await makes the owner send a request to the control plane, and waits for the answer.
func (a *Agent) await(ctx context.Context, send func(*owner) *answer) error {
	reply := make(chan *answer, 1)
	a.do(ctx, func(o *owner) { reply <- send(o) })
	var q *answer
	select {
	case q = <-reply:
	case <-ctx.Done():
		return ErrUnanswered
	}
	select {
	case <-q.done:
		return q.err
	case <-ctx.Done():
		return ErrUnanswered
	}
}

func failed(err error) *answer {
	q := &answer{done: make(chan struct{})}
	q.end(err)
	return q
}

func (o *owner) confirm(id topicChannel, created uint64) *answer {
	if o.control == nil {
		return failed(ErrDisconnected)
	}
	q := o.channels.creating[id]
	if q == nil {
		q = &answer{created: created, done: make(chan struct{})}
		o.channels.creating[id] = q
		o.channels.waiting[id.topic] = append(o.channels.waiting[id.topic], id.channel)
		o.requestChannels()
	}
	return q
}

// requestChannels sends the waiting creations while the session has room.
func (o *owner) requestChannels() {
	if o.control == nil {
		return
	}
	c := &o.channels
	for topic, names := range c.waiting {
		if c.perTopic[topic] >= requestsPerTopic {
			continue // the next answer sends these names
		}
		if len(o.control.out) >= reportsQueue {
			c.retry.Reset(requestRetry)
			return
		}
		delete(c.waiting, topic)
		c.perTopic[topic]++
		request := &srtmv1.ChannelRequest{Topic: topic, Change: srtmv1.ChannelChange_CHANNEL_CHANGE_CREATE}
		for _, name := range names {
			request.Channels = append(request.Channels, &srtmv1.TopicChannel{Name: name, Created: c.creating[topicChannel{topic, name}].created})
		}
		o.request(request, &channelRequest{topic: topic, names: names})
	}
}

// Requires: a session is open.
func (o *owner) request(m *srtmv1.ChannelRequest, open *channelRequest) {
	o.channels.requests++
	m.Request = o.channels.requests
	o.channels.open[m.Request] = open
	o.control.reply(&srtmv1.BrokerMessage{Message: &srtmv1.BrokerMessage_ChannelRequest{ChannelRequest: m}})
}

func (o *owner) changeChannel(topic, channel string, change srtmv1.ChannelChange) *answer {
	switch {
	case o.control == nil:
		return failed(ErrDisconnected)
	case len(o.control.out) >= reportsQueue:
		return failed(ErrUnanswered)
	}
	q := &answer{done: make(chan struct{})}
	o.request(&srtmv1.ChannelRequest{Topic: topic, Change: change, Channels: []*srtmv1.TopicChannel{{Name: channel}}}, &channelRequest{topic: topic, waiter: q})
	return q
}

// channelAnswer handles the control plane's answer to a request.
func (o *owner) channelAnswer(m *srtmv1.ChannelAnswer) {
	c := &o.channels
	r := c.open[m.Request]
	if r == nil {
		return // from an earlier session
	}
	delete(c.open, m.Request)
	var err error
	switch m.Reason {
	case "":
	case "TOPIC_UNKNOWN":
		err = ErrTopicUnknown
	case "CHANNEL_UNKNOWN":
		err = ErrChannelUnknown
	case "CHANNEL_IN_USE":
		err = ErrChannelInUse
	case "TOO_MANY_CHANNELS":
		err = ErrTooManyChannels
	default:
		err = fmt.Errorf("refused: %s", m.Error)
	}
	if r.waiter != nil {
		r.waiter.end(err)
		return
	}
	if c.perTopic[r.topic]--; c.perTopic[r.topic] == 0 {
		delete(c.perTopic, r.topic)
	}
	var settled []string
	for _, name := range r.names {
		id := topicChannel{r.topic, name}
		q := c.creating[id]
		delete(c.creating, id)
		if err != nil && (len(m.Refused) == 0 || slices.Contains(m.Refused, name)) {
			q.end(err)
			continue
		}
		settled = append(settled, name)
		defer q.end(nil)
	}
	if settled != nil {
		o.node.Settled(r.topic, settled)
	}
	o.requestChannels()
}

// channelsDown fails all requests of a session that is over.
func (o *owner) channelsDown() {
	c := &o.channels
	for _, r := range c.open {
		if r.waiter != nil {
			r.waiter.end(ErrDisconnected)
		}
	}
	for _, q := range c.creating {
		q.end(ErrDisconnected)
	}
	c.reset()
}
