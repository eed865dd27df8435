package topics

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
)

// The SLO of a topic whose specification has none, in the API, srtm and the console.
const (
	DefaultQuantile = 0.99
	DefaultLatency  = 100 * time.Millisecond
)

// Bounds of an SLO's latency. A message takes a broker some tens of microseconds from read
// to write, so a shorter latency would judge the broker's clock. The histograms of brokers end
// at the longer one, so no broker could show that it was exceeded.
const (
	MinLatency = 100 * time.Microsecond
	MaxLatency = time.Minute
)

// CompleteSLO returns the SLO with defaults for what it leaves out. Its argument may be nil,
// and is not modified.
func CompleteSLO(s *srtmv1.Slo) *srtmv1.Slo {
	whole := &srtmv1.Slo{Quantile: s.GetQuantile(), Latency: s.GetLatency()}
	if whole.Quantile == 0 {
		whole.Quantile = DefaultQuantile
	}
	if whole.Latency == nil {
		whole.Latency = durationpb.New(DefaultLatency)
	}
	return whole
}

// CheckLatency returns an error, with the reason, for a latency that brokers cannot judge.
func CheckLatency(d time.Duration) error {
	switch {
	case d < MinLatency:
		return fmt.Errorf("%v is below %v: a broker takes about as long to read and write a message, so it cannot tell whether the SLO is kept", d, MinLatency)
	case d > MaxLatency:
		return fmt.Errorf("%v is above %v: brokers count longer latencies as %v, so they cannot tell whether the SLO is kept", d, MaxLatency, MaxLatency)
	}
	return nil
}
