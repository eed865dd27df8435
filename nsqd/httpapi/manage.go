package httpapi

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"

	"github.com/srtm-io/srtm/nsq/nsqhttp"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/tokenbucket"
)

// existing returns the topic with that name. The name may be invalid.
func (a *API) existing(name string) (*broker.Topic, error) {
	t, err := a.broker.Topic([]byte(name))
	if err != nil {
		return nil, fmt.Errorf("topic %q: %w", name, err)
	}
	return t, nil
}

// named returns the topic that a request names.
func (a *API) named(q url.Values) (*broker.Topic, error) {
	name, err := nsqhttp.TopicArgument(q, "INVALID_TOPIC")
	if err != nil {
		return nil, err
	}
	return a.existing(name)
}

// onTopic returns a handler for an existing topic.
func (a *API) onTopic(do func(*broker.Topic) error) handler {
	return func(r *http.Request) (string, error) {
		name, err := nsqhttp.Argument(r.URL.Query(), "topic", "MISSING_ARG_TOPIC")
		if err != nil {
			return "", err
		}
		t, err := a.existing(name)
		if err != nil {
			return "", err
		}
		return "", do(t)
	}
}

// ChannelChange is a change of a channel on all brokers of its topic.
type ChannelChange uint8

// Changes of a channel.
const (
	PauseChannel ChannelChange = iota
	UnpauseChannel
	DeleteChannel
)

var (
	// ErrControl reports that the control plane is not connected, or has not made the change in
	// time.
	ErrControl = errors.New("the control plane has not made the change")
	// ErrUnmanaged reports that the control plane does not manage the topic on this broker.
	ErrUnmanaged = errors.New("the topic is this broker's alone")
)

// onChannels returns a handler for a channel of an existing topic, on all brokers of the topic. For
// an ephemeral channel, or a topic of this broker alone, the handler calls local instead. The
// deletion of a cluster's channel succeeds even if the channel is gone, because NSQ's tools ask
// each broker of the topic.
func (a *API) onChannels(change ChannelChange, local func(*broker.Topic, string) error) handler {
	if a.cfg.ChangeChannel == nil {
		return a.onChannel(local)
	}
	return a.onChannelRequest(func(r *http.Request, t *broker.Topic, channel string) error {
		if wire.Ephemeral(channel) || wire.Ephemeral(t.Name()) {
			return local(t, channel)
		}
		err := a.cfg.ChangeChannel(r.Context(), t.Name(), channel, change)
		if errors.Is(err, ErrUnmanaged) {
			return local(t, channel)
		}
		return err
	})
}

// onChannel is onChannelRequest for an operation on this broker only.
func (a *API) onChannel(do func(*broker.Topic, string) error) handler {
	return a.onChannelRequest(func(_ *http.Request, t *broker.Topic, channel string) error { return do(t, channel) })
}

// onChannelRequest returns a handler for a channel of an existing topic.
func (a *API) onChannelRequest(do func(*http.Request, *broker.Topic, string) error) handler {
	return func(r *http.Request) (string, error) {
		q := r.URL.Query()
		name, err := nsqhttp.TopicArgument(q, "INVALID_ARG_TOPIC")
		if err != nil {
			return "", err
		}
		channel, err := nsqhttp.Argument(q, "channel", "MISSING_ARG_CHANNEL")
		if err != nil {
			return "", err
		}
		if !wire.ValidChannelName(channel) {
			return "", nsqhttp.BadRequest("INVALID_ARG_CHANNEL", "channel %q is not a valid name", channel)
		}
		t, err := a.existing(name)
		if err != nil {
			return "", err
		}
		return "", do(r, t, channel)
	}
}

// errManaged refuses an operation on a managed broker and says what to do instead. The status is
// not 403: nsqadmin takes 403 as a request to ask by HTTPS, and does not show the text.
func (a *API) errManaged(command string) error {
	if !a.cfg.Managed {
		return nil
	}
	return nsqhttp.Refuse(http.StatusConflict, "MANAGED", "this broker's topics are the loaddistributor's: %s", command)
}

func (a *API) createTopic(r *http.Request) (string, error) {
	name, err := nsqhttp.TopicArgument(r.URL.Query(), "INVALID_TOPIC")
	if err = errors.Join(err, a.errManaged(fmt.Sprintf("use srtm topic create %.64s --rate=RATE --burst=BURST", name))); err != nil {
		return "", err
	}
	_, err = a.broker.OrderTopic(name)
	return "", err
}

func (a *API) deleteTopic(r *http.Request) (string, error) {
	name, err := nsqhttp.Argument(r.URL.Query(), "topic", "MISSING_ARG_TOPIC")
	if err = errors.Join(err, a.errManaged(fmt.Sprintf("use srtm topic delete %.64s", name))); err != nil {
		return "", err
	}
	if err := a.broker.DeleteTopic(name); err != nil {
		return "", fmt.Errorf("topic %q: %w", name, err)
	}
	return "", nil
}

func (a *API) emptyTopic(r *http.Request) (string, error) {
	t, err := a.named(r.URL.Query())
	if err == nil {
		err = t.Empty()
	}
	return "", err
}

// limited returns the topic of a request on a standalone broker's contract.
func (a *API) limited(q url.Values) (*broker.Topic, error) {
	t, err := a.named(q)
	return t, errors.Join(err, a.errManaged(fmt.Sprintf("use srtm topic update %.64s --rate=RATE --burst=BURST", q.Get("topic"))))
}

// unlimitTopic removes the contract, if there is one, and releases the waiting messages.
func (a *API) unlimitTopic(r *http.Request) (string, error) {
	t, err := a.limited(r.URL.Query())
	if err == nil {
		err = t.RemoveContract()
	}
	return "", err
}

// limitTopic sets a standalone broker's contract for a topic: rate (msg/s, up to three decimals),
// burst (messages), policy (delay or reject, default delay).
func (a *API) limitTopic(r *http.Request) (string, error) {
	q := r.URL.Query()
	t, err := a.limited(q)
	if err != nil {
		return "", err
	}
	rate, err := strconv.ParseFloat(q.Get("rate"), 64)
	if err != nil {
		return "", nsqhttp.BadRequest("INVALID_RATE", "rate %q is not a number of messages per second", q.Get("rate"))
	}
	burst, err := strconv.ParseInt(q.Get("burst"), 10, 64)
	if err != nil {
		return "", nsqhttp.BadRequest("INVALID_BURST", "burst %q is not a number of messages", q.Get("burst"))
	}
	policy := q.Get("policy")
	if policy != "" && policy != "delay" && policy != "reject" {
		return "", nsqhttp.BadRequest("INVALID_POLICY", "policy %q is neither delay nor reject", policy)
	}
	share := tokenbucket.Share{Rate: tokenbucket.PerSecond(rate), Burst: burst}
	if err := share.Validate(); err != nil {
		return "", nsqhttp.BadRequest("INVALID_LIMIT", "%v", err)
	}
	if share.IsZero() {
		return "", nsqhttp.BadRequest("INVALID_LIMIT", "a rate and a burst of 0 would stop the topic")
	}
	return "", t.Contract(share, policy == "reject")
}
