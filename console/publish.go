package console

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/srtm-io/srtm/internal/plural"
)

// checkMessage checks the message of a form.
func checkMessage(form url.Values) error {
	switch text := strings.TrimSpace(form.Get("delay")); {
	case form.Get("body") == "":
		return &problem{http.StatusBadRequest, "The message is empty."}
	case text != "":
		if ms, err := strconv.ParseUint(text, 10, 31); err != nil {
			return &problem{http.StatusBadRequest, fmt.Sprintf("The delay %.40q is not a number of milliseconds, such as 500.", text)}
		} else if form.Set("delay", strconv.FormatUint(ms, 10)); ms == 0 {
			form.Del("delay")
		}
	}
	return nil
}

// publish sends the message of a form to a broker of the topic.
func (o operator) publish(ctx context.Context, form url.Values) (string, error) {
	brokers, _, err := o.brokers.holders(ctx, form.Get("topic"))
	if err != nil {
		return "", err
	}
	id := slices.Min(slices.Collect(maps.Keys(brokers)))
	q := url.Values{"topic": {form.Get("topic")}}
	if delay := form.Get("delay"); delay != "" {
		q.Set("defer", delay)
	}
	if _, err := o.brokers.send(ctx, o.brokers.transport, http.MethodPost, brokers[id], "/pub?"+q.Encode(), strings.NewReader(form.Get("body"))); err != nil {
		return "", err
	}
	return strings.TrimSpace(fmt.Sprintf("Published %s to the broker %s", plural.Count(len(form.Get("body")), "byte"), id)) + ".", nil
}
