package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/topics"
)

// describeExpiry prints when messages of a topic expire, if anything is set.
func describeExpiry(w io.Writer, spec *srtmv1.TopicSpec) {
	if text := topics.ExpiryText(spec.GetExpiry()); text != "" {
		fmt.Fprintf(w, "messages  %s\n", text)
	}
	for _, channel := range slices.Sorted(maps.Keys(spec.GetChannelExpiry())) {
		fmt.Fprintf(w, "          channel %s: %s\n", channel, topics.ExpiryText(spec.GetChannelExpiry()[channel]))
	}
}

// keptText is topics.ExpiryText with a text for no expiry.
func keptText(e *srtmv1.Expiry) string {
	return cmp.Or(topics.ExpiryText(e), "kept until they are finished")
}
