package httpapi

import (
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/srtm-io/srtm/internal/expiry"
	"github.com/srtm-io/srtm/nsq/nsqhttp"
	"github.com/srtm-io/srtm/nsqd/broker"
)

type expiryJSON struct {
	TTL         float64 `json:"ttl_seconds,omitempty"`
	MaxAttempts int     `json:"max_attempts,omitempty"`
	DeadLetter  string  `json:"dead_letter,omitempty"`
}

func expiryOf(e expiry.Settings) *expiryJSON {
	if !e.On() {
		return nil
	}
	return &expiryJSON{e.TTL.Seconds(), e.MaxAttempts, e.DeadLetter}
}

// expiryArgument parses ?ttl=1h&max_attempts=5&dead_letter=orders.dead. At least one parameter is
// required.
func expiryArgument(q url.Values) (e expiry.Settings, err error) {
	if text := q.Get("ttl"); text != "" {
		if e.TTL, err = time.ParseDuration(text); err != nil || e.TTL <= 0 {
			return e, nsqhttp.BadRequest("INVALID_TTL", "ttl=%.100q is not a positive duration such as 1h", text)
		}
	}
	if text := q.Get("max_attempts"); text != "" {
		if e.MaxAttempts, err = strconv.Atoi(text); err != nil || e.MaxAttempts <= 0 {
			return e, nsqhttp.BadRequest("INVALID_MAX_ATTEMPTS", "max_attempts=%.100q is not a positive number of deliveries such as 5", text)
		}
	}
	if e.DeadLetter = q.Get("dead_letter"); !e.On() {
		return e, nsqhttp.BadRequest("MISSING_ARG_EXPIRY", "give ttl, max_attempts or dead_letter; DELETE removes the settings")
	}
	return e, nil
}

const expireTopics = "use srtm topic update with --ttl, --max-attempts and --dead-letter"

// setExpiry turns an error about the settings into a 400 response.
func setExpiry(err error) (string, error) {
	if err != nil {
		return "", nsqhttp.BadRequest("INVALID_EXPIRY", "%v", err)
	}
	return "", nil
}

func (a *API) topicExpiry(q url.Values, e expiry.Settings) (string, error) {
	if err := a.errManaged(expireTopics); err != nil {
		return "", err
	}
	t, err := a.named(q)
	if err != nil {
		return "", err
	}
	return setExpiry(t.SetExpiry(e))
}

// expireTopic sets when a topic discards its messages.
func (a *API) expireTopic(r *http.Request) (string, error) {
	e, err := expiryArgument(r.URL.Query())
	if err != nil {
		return "", err
	}
	return a.topicExpiry(r.URL.Query(), e)
}

// unexpireTopic makes a topic keep its messages until they are finished.
func (a *API) unexpireTopic(r *http.Request) (string, error) {
	return a.topicExpiry(r.URL.Query(), expiry.Settings{})
}

func (a *API) channelExpiry(r *http.Request, e expiry.Settings) (string, error) {
	if err := a.errManaged(expireTopics); err != nil {
		return "", err
	}
	return a.onChannel(func(t *broker.Topic, channel string) error {
		if !slices.Contains(t.ChannelNames(), channel) {
			return broker.ErrUnknownChannel
		}
		_, err := setExpiry(t.SetChannelExpiry(channel, e))
		return err
	})(r)
}

// expireChannel sets when a channel discards its messages.
func (a *API) expireChannel(r *http.Request) (string, error) {
	e, err := expiryArgument(r.URL.Query())
	if err != nil {
		return "", err
	}
	return a.channelExpiry(r, e)
}

// unexpireChannel makes a channel use the topic's settings again.
func (a *API) unexpireChannel(r *http.Request) (string, error) {
	return a.channelExpiry(r, expiry.Settings{})
}
