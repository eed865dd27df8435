package topics

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/testkit"
)

func TestCompleteSLOFillsInWhatIsLeftOut(t *testing.T) {
	for want, s := range map[string]*srtmv1.Slo{
		"99 % within 100ms": nil, "90 % within 100ms": {Quantile: 0.9}, "99 % within 5ms": {Latency: durationpb.New(5 * time.Millisecond)},
		"50 % within 1s": {Quantile: 0.5, Latency: durationpb.New(time.Second)},
	} {
		testkit.Equal(t, SLO(CompleteSLO(s)), want)
	}
}

// The histograms of brokers can judge every accepted latency.
func TestLatenciesThatBrokersCanMeasure(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0s is below 100µs: a broker takes", 99 * time.Microsecond: "99µs is below 100µs", MinLatency: "", time.Second: "", MaxLatency: "", MaxLatency + 1: "is above 1m0s: brokers count",
	} {
		if err := CheckLatency(d); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %q", d, err, want)
		}
	}
	l := histogram.NewLatency()
	l.Record(MinLatency + 2*time.Microsecond)
	l.Record(MaxLatency + time.Second)
	testkit.Equal(t, l.CountAbove(MinLatency), int64(2), "above the shortest")
	testkit.Equal(t, l.CountAbove(MaxLatency), int64(0), "above the longest, which no histogram can show")
}
