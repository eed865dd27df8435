package topics

import (
	"errors"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestChannelExpiryIsReadAsItIsWritten(t *testing.T) {
	for _, text := range []string{"a:ttl=10m0s", "a:max-attempts=3", "a:ttl=1s,max-attempts=65535,dead-letter=t.dead"} {
		all, faults := ParseChannelExpiry([]string{text})
		testkit.Equal(t, len(faults), 0, "%s: %v", text, faults)
		testkit.Equal(t, FormatChannelExpiry("a", all["a"]), text)
	}
}

func TestEveryFaultOfChannelExpiryIsReported(t *testing.T) {
	all, faults := ParseChannelExpiry([]string{"", ":ttl=1s", "a:ttl=soon", "b:max-attempts=-1", "c:other=1", "d:ttl=1s", "d:ttl=2s", "e"})
	testkit.Equal(t, len(all), 1, "%v", all)
	text := errors.Join(faults...).Error()
	for _, want := range []string{`"" is not CHANNEL:ttl=10m,...`, "there is no channel", "invalid duration", "invalid syntax", `"other" is none of`, `channel "d" appears twice`, `"e" is not`} {
		if !strings.Contains(text, want) {
			t.Errorf("no fault says %s:\n%s", want, text)
		}
	}
}
