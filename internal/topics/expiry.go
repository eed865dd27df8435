package topics

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/plural"
)

// ChannelExpiryForm is the form that ParseChannelExpiry reads.
const ChannelExpiryForm = "CHANNEL:ttl=10m,..."

// ParseChannelExpiry returns the settings by channel, nil without any, and a fault for
// each invalid text. A channel may appear once.
func ParseChannelExpiry(texts []string) (all map[string]*srtmv1.Expiry, faults []error) {
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
			faults = append(faults, fmt.Errorf("%q is not %s: %w", text, ChannelExpiryForm, err))
			continue
		}
		if all == nil {
			all = map[string]*srtmv1.Expiry{}
		}
		all[channel] = e
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

// FormatChannelExpiry formats a channel's settings for ParseChannelExpiry.
func FormatChannelExpiry(channel string, e *srtmv1.Expiry) string {
	var parts []string
	if e.GetTtl() != nil {
		parts = append(parts, "ttl="+e.Ttl.AsDuration().String())
	}
	if e.GetMaxAttempts() > 0 {
		parts = append(parts, fmt.Sprintf("max-attempts=%d", e.MaxAttempts))
	}
	if e.GetDeadLetterTopic() != "" {
		parts = append(parts, "dead-letter="+e.DeadLetterTopic)
	}
	return channel + ":" + strings.Join(parts, ",")
}

// ExpiryText describes settings in one line; "" if nothing is set.
func ExpiryText(e *srtmv1.Expiry) string {
	var parts []string
	if ttl := e.GetTtl().AsDuration(); ttl > 0 {
		parts = append(parts, fmt.Sprintf("discarded after %v", ttl))
	}
	if n := e.GetMaxAttempts(); n > 0 {
		parts = append(parts, "given up after "+plural.Count(n, "delivery"))
	}
	if target := e.GetDeadLetterTopic(); target != "" {
		parts = append(parts, "then sent to "+target)
	}
	return strings.Join(parts, ", ")
}
