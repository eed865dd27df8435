package controller

import (
	"fmt"
	"net"
	"strconv"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
)

// Values of the API's enumerations.
var (
	OverLimits = service.Enum[srtmv1.OverLimitPolicy, catalog.OverLimit]{
		srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_UNSPECIFIED: catalog.Delay,
		srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_DELAY:       catalog.Delay,
		srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_REJECT:      catalog.Reject,
	}
	Durabilities = service.Enum[srtmv1.Durability, catalog.Durability]{
		srtmv1.Durability_DURABILITY_UNSPECIFIED: "",
		srtmv1.Durability_DURABILITY_MEMORY:      catalog.DurabilityMemory,
		srtmv1.Durability_DURABILITY_FSYNC:       catalog.DurabilityFsync,
		srtmv1.Durability_DURABILITY_REPLICATED:  catalog.DurabilityReplicated,
	}
	Pacings = service.Enum[srtmv1.PacingMode, catalog.Pacing]{
		srtmv1.PacingMode_PACING_MODE_UNSPECIFIED: "",
		srtmv1.PacingMode_PACING_MODE_OFF:         catalog.PacingOff,
		srtmv1.PacingMode_PACING_MODE_ADVISE:      catalog.PacingAdvise,
		srtmv1.PacingMode_PACING_MODE_POLICE:      catalog.PacingPolice,
	}
)

// HostPort splits an address for dialing.
func HostPort(address string) (host string, port int, err error) {
	host, text, err := net.SplitHostPort(address)
	if err != nil || host == "" || len(address) > 300 {
		return "", 0, fmt.Errorf("%.300q: want host:port", address)
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 {
		return "", 0, fmt.Errorf("%.300q: want a port of 1 to 65535", address)
	}
	return host, int(n), nil
}

// ContractProto returns a topic's contract.
func ContractProto(s *catalog.Spec) *srtmv1.Contract {
	return &srtmv1.Contract{
		RateMilli: s.Demand.RateMilli, Burst: s.Demand.Burst,
		Slo:       &srtmv1.Slo{Quantile: s.SLO.Quantile, Latency: durationpb.New(s.SLO.Latency)},
		OverLimit: OverLimits.Number(s.OverLimit),
	}
}

// fitProto converts a fit for a status.
func fitProto(f tuner.Status) *srtmv1.Fit {
	p := &srtmv1.Fit{Ended: f.Ended, Fitted: f.Fitted}
	for _, r := range f.Rounds {
		p.Rounds = append(p.Rounds, &srtmv1.FitRounds{K: uint32(r.K), Rounds: uint32(r.Rounds)})
	}
	for _, t := range f.Trials {
		trial := &srtmv1.FitTrial{
			Began: timestamppb.New(t.Start), Delivered: t.Delivered, Exceeded: t.Exceeded, Confidence: t.Confidence, Verdict: t.Verdict,
			Quantile: durationpb.New(t.Quantile),
		}
		if t.Forecast >= 0 {
			trial.Forecast = &t.Forecast
		}
		for _, q := range t.Quotas {
			trial.Quotas = append(trial.Quotas, &srtmv1.BrokerQuota{BrokerId: q.Broker, Rate: q.Rate, Publishers: uint32(len(q.Publishers)), Share: service.ShareProto(q.Share)})
		}
		p.Trials = append(p.Trials, trial)
	}
	if f.Started {
		p.Took = durationpb.New(f.Duration)
	}
	return p
}

func channelProto(c catalog.Channel) *srtmv1.TopicChannel {
	return &srtmv1.TopicChannel{Name: c.Name, Created: c.Created, Paused: c.Paused}
}

// channelsProto converts channels for PrepareTopic and for lists.
func channelsProto(channels []catalog.Channel) []*srtmv1.TopicChannel {
	list := make([]*srtmv1.TopicChannel, len(channels))
	for i, c := range channels {
		list[i] = channelProto(c)
	}
	return list
}
