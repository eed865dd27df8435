package console

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/topics"
)

// channelExpiryLines formats the settings of channels for the form, one line per channel.
func channelExpiryLines(all map[string]*srtmv1.Expiry) string {
	var lines []string
	for _, channel := range slices.Sorted(maps.Keys(all)) {
		lines = append(lines, topics.FormatChannelExpiry(channel, all[channel]))
	}
	return strings.Join(lines, "\n")
}

// expire changes the message expiry of a topic to the settings of the form. Empty
// settings are removed.
func (o operator) expire(ctx context.Context, form url.Values) (string, error) {
	spec, err := expiryOf(form)
	if err != nil {
		return "", &problem{http.StatusBadRequest, err.Error()}
	}
	r := &srtmv1.UpdateTopicRequest{Spec: spec, UpdateMask: &fieldmaskpb.FieldMask{
		Paths: []string{"expiry.ttl", "expiry.max_attempts", "expiry.dead_letter_topic", "channel_expiry"},
	}}
	if _, err := o.admin.UpdateTopic(ctx, r); err != nil {
		return "", err
	}
	if text := topics.ExpiryText(spec.Expiry); text != "" {
		return "Changed. Messages of the topic are " + text + ".", nil
	}
	return "Changed. Messages of the topic stay until consumers finish them.", nil
}

// expiryOf reads the form, or returns all its faults.
func expiryOf(form url.Values) (*srtmv1.TopicSpec, error) {
	spec := &srtmv1.TopicSpec{Name: form.Get("topic")}
	var faults, wrong []error
	spec.Expiry, faults = expiryFields(form)
	spec.ChannelExpiry, wrong = topics.ParseChannelExpiry(strings.Fields(form.Get("channels")))
	return spec, errors.Join(append(faults, wrong...)...)
}

// expiryFields reads the settings of a topic from a form.
func expiryFields(form url.Values) (*srtmv1.Expiry, []error) {
	e := &srtmv1.Expiry{DeadLetterTopic: strings.TrimSpace(form.Get("dead"))}
	var faults []error
	if text := strings.TrimSpace(form.Get("ttl")); text != "" {
		ttl, err := time.ParseDuration(text)
		if err != nil {
			faults = append(faults, fmt.Errorf("TTL: %.40q is not a duration such as 1h or 90s", text))
		}
		e.Ttl = durationpb.New(ttl)
	}
	if text := strings.TrimSpace(form.Get("attempts")); text != "" {
		n, err := strconv.ParseUint(text, 10, 32)
		if err != nil || n < 1 || n > math.MaxUint16 {
			faults = append(faults, fmt.Errorf("deliveries: %.40q is not a number from 1 to %d, such as 5", text, math.MaxUint16))
		}
		e.MaxAttempts = uint32(n)
	}
	return e, faults
}
