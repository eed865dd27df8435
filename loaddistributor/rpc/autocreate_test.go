package rpc

import (
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestDefaultTopicsThatAreWrong(t *testing.T) {
	for text, want := range map[string]string{
		`{`:                                    "JSON",
		`{"nonsense":1}`:                       "nonsense",
		`{"name":"t"}`:                         "has the name",
		`{"publishers":[{"id":"p","rate":1}]}`: "has publishers",
		`{"groups":[{"key":"g","count":1,"rate":1}]}`:                    "has publishers",
		`{"contract":{"slo":{"quantile":2,"latency":"1s"}}}`:             "quantile",
		`{"auto":{"max_rate_milli":1000,"min_burst":10,"max_burst":5}}`:  "burst",
		`{"channels":["no such channel"]}`:                               "channel",
		`{"contract":{"slo":{"quantile":0.9,"latency":"0.000000001s"}}}`: "latency",
	} {
		if _, err := ParseTopic(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q in it", text, err, want)
		}
	}
	for _, text := range []string{
		"", "{}", `{"contract":{"rate_milli":5000,"burst":5}}`, `{"auto":{"max_rate_milli":5000000,"min_burst":10,"max_burst":1000}}`,
		`{"contract":{"slo":{"quantile":0.9,"latency":"1s"}},"channels":["archive"]}`,
	} {
		spec, err := ParseTopic(text)
		testkit.NoError(t, err, "%s", text)
		testkit.Equal(t, spec.GetName(), "")
	}
}
