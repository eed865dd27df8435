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

// given counts the given-up messages of a topic or a channel over all answering brokers,
// each since its start.
type given struct {
	Channel                        string // "": given up in the topic, without a token
	Expired, GivenUp, DeadLettered uint64
}

// givenUp asks the brokers of a topic for their counts of given-up messages. The first
// count belongs to the topic itself. Without an answer there are no counts.
func (c *Console) givenUp(ctx context.Context, topic string) (all []given, trouble string) {
	if c.cfg.Brokers == nil {
		return nil, ""
	}
	found, err := c.holders(ctx, topic)
	if err != nil {
		return nil, problemOf(err).text
	}
	type answer struct {
		brokerStats
		err error
	}
	of, own, answered := map[string]given{}, given{}, 0
	for _, a := range each(found, func(_, address string) (a answer) {
		a.brokerStats, a.err = c.stats(ctx, address, topic, "", false)
		return a
	}) {
		if a.err != nil {
			trouble = problemOf(a.err).text
			continue
		}
		answered++
		for _, t := range a.Topics {
			own.Expired += t.SRTM.Expired
			for _, ch := range t.Channels {
				g := of[ch.Name]
				of[ch.Name] = given{ch.Name, g.Expired + ch.SRTM.Expired, g.GivenUp + ch.SRTM.GivenUp, g.DeadLettered + ch.SRTM.DeadLettered}
			}
		}
	}
	if answered == 0 {
		return nil, trouble
	}
	all = append(all, own)
	for _, name := range slices.Sorted(maps.Keys(of)) {
		all = append(all, of[name])
	}
	return all, trouble
}

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
func (c *Console) expire(ctx context.Context, form url.Values) (string, error) {
	spec, err := expiryOf(form)
	if err != nil {
		return "", &problem{http.StatusBadRequest, err.Error()}
	}
	r := &srtmv1.UpdateTopicRequest{Spec: spec, UpdateMask: &fieldmaskpb.FieldMask{
		Paths: []string{"expiry.ttl", "expiry.max_attempts", "expiry.dead_letter_topic", "channel_expiry"},
	}}
	if _, err := c.admin.UpdateTopic(ctx, r); err != nil {
		return "", err
	}
	if text := topics.ExpiryText(spec.Expiry); text != "" {
		return "Changed. Messages of the topic are " + text + ".", nil
	}
	return "Changed. Messages of the topic stay until consumers finish them.", nil
}

// expiryOf reads the form, or returns all its faults.
func expiryOf(form url.Values) (*srtmv1.TopicSpec, error) {
	spec := &srtmv1.TopicSpec{Name: form.Get("topic"), Expiry: &srtmv1.Expiry{DeadLetterTopic: strings.TrimSpace(form.Get("dead"))}}
	var faults, wrong []error
	if text := strings.TrimSpace(form.Get("ttl")); text != "" {
		ttl, err := time.ParseDuration(text)
		if err != nil {
			faults = append(faults, fmt.Errorf("TTL: %.40q is not a duration such as 1h or 90s", text))
		}
		spec.Expiry.Ttl = durationpb.New(ttl)
	}
	if text := strings.TrimSpace(form.Get("attempts")); text != "" {
		n, err := strconv.ParseUint(text, 10, 32)
		if err != nil || n < 1 || n > math.MaxUint16 {
			faults = append(faults, fmt.Errorf("deliveries: %.40q is not a number from 1 to %d, such as 5", text, math.MaxUint16))
		}
		spec.Expiry.MaxAttempts = uint32(n)
	}
	spec.ChannelExpiry, wrong = topics.ParseChannelExpiry(strings.Fields(form.Get("channels")))
	return spec, errors.Join(append(faults, wrong...)...)
}
