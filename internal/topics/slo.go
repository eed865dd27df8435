package topics

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
)

// Default SLO of a topic, in the API, srtm and the console.
const (
	DefaultQuantile = 0.99
	DefaultLatency  = 100 * time.Millisecond
)

// Bounds of an SLO's latency. A broker takes some tens of microseconds from reading to
// writing a message, so a shorter latency would judge the broker's clock. The brokers'
// histograms end at MaxLatency, so no broker could show that a longer latency was
// exceeded.
const (
	MinLatency = 100 * time.Microsecond
	MaxLatency = time.Minute
)

// CompleteSLO returns the SLO with defaults for missing fields. It does not modify its
// argument, which may be nil.
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

// CheckLatency returns an error, with the reason, for a latency that brokers cannot
// judge.
func CheckLatency(d time.Duration) error {
	switch {
	case d < MinLatency:
		return fmt.Errorf("%v is below %v: a broker takes about as long to read and write a message, so it cannot tell whether the SLO is kept", d, MinLatency)
	case d > MaxLatency:
		return fmt.Errorf("%v is above %v: brokers count longer latencies as %v, so they cannot tell whether the SLO is kept", d, MaxLatency, MaxLatency)
	}
	return nil
}
