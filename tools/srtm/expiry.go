package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
)

// channelExpiryForm is the form of --channel-expiry.
const channelExpiryForm = "CHANNEL:ttl=10m,..."

// parseChannelExpiry returns the settings by channel, and appends to faults what is wrong with
// each text. A channel may appear once.
func parseChannelExpiry(texts []string, faults []error) (map[string]*srtmv1.Expiry, []error) {
	all := map[string]*srtmv1.Expiry{}
	for _, text := range texts {
		channel, settings, _ := strings.Cut(text, ":")
		e, err := parseExpiry(settings)
		switch {
		case channel == "":
			err = errors.New("there is no channel")
		case all[channel] != nil:
			err = fmt.Errorf("channel %q appears twice", channel)
		}
		if err != nil {
			faults = append(faults, fmt.Errorf("--channel-expiry %q is not %s: %w", text, channelExpiryForm, err))
			continue
		}
		all[channel] = e
	}
	if len(all) == 0 {
		return nil, faults
	}
	return all, faults
}

func parseExpiry(text string) (*srtmv1.Expiry, error) {
	e := &srtmv1.Expiry{}
	for setting := range strings.SplitSeq(text, ",") {
		name, value, _ := strings.Cut(setting, "=")
		switch name {
		case "ttl":
			ttl, err := time.ParseDuration(value)
			if err != nil {
				return nil, err
			}
			e.Ttl = durationpb.New(ttl)
		case "max-attempts":
			n, err := strconv.ParseUint(value, 10, 32)
			if err != nil {
				return nil, err
			}
			e.MaxAttempts = uint32(n)
		case "dead-letter":
			e.DeadLetterTopic = value
		default:
			return nil, fmt.Errorf("%q is none of ttl, max-attempts and dead-letter", name)
		}
	}
	return e, nil
}

// expiryText describes settings in one line; "" where nothing is set.
func expiryText(e *srtmv1.Expiry) string {
	var parts []string
	if ttl := e.GetTtl().AsDuration(); ttl > 0 {
		parts = append(parts, fmt.Sprintf("discarded after %v", ttl))
	}
	if n := e.GetMaxAttempts(); n > 0 {
		parts = append(parts, fmt.Sprintf("given up after %d deliveries", n))
	}
	if to := e.GetDeadLetterTopic(); to != "" {
		parts = append(parts, "then sent to "+to)
	}
	return strings.Join(parts, ", ")
}

// describeExpiry prints when messages of a topic are given up, if anything is set.
func describeExpiry(w io.Writer, spec *srtmv1.TopicSpec) {
	if text := expiryText(spec.GetExpiry()); text != "" {
		fmt.Fprintf(w, "messages  %s\n", text)
	}
	for _, channel := range slices.Sorted(maps.Keys(spec.GetChannelExpiry())) {
		fmt.Fprintf(w, "          channel %s: %s\n", channel, expiryText(spec.GetChannelExpiry()[channel]))
	}
}

// keptText is expiryText, where nothing set is said, too.
func keptText(e *srtmv1.Expiry) string {
	return cmp.Or(expiryText(e), "kept until they are finished")
}
