package metadata_test

import (
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/metadata"
)

func TestRetention(t *testing.T) {
	for text, want := range map[string]metadata.Retention{
		"": {}, "0": {}, "24h": {Age: 24 * time.Hour}, "10GB": {Bytes: 10e9}, "1MiB, 90s": {Age: 90 * time.Second, Bytes: 1 << 20},
	} {
		got, err := metadata.ParseRetention(text)
		if err != nil || got != want {
			t.Errorf("%q: %v, %v", text, got, err)
		}
		testkit.Result(metadata.ParseRetention(got.String())).Equal(t, got, "%q", text)
	}
	for _, text := range []string{"x", "-1h", "0s", "0GB", "10", "1h,2h", "1GB,2GB", ",", "9223372036854775807KB", "1.5GB"} {
		if got, err := metadata.ParseRetention(text); err == nil {
			t.Errorf("%q: %v", text, got)
		}
	}
}
