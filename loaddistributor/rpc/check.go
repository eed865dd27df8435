package rpc

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/expiry"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/internal/topics"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/sizing"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Limits of a request. The limits of publishers and groups are in placement.
const (
	// maxChannels is the maximum number of channels in a creation.
	maxChannels = 1000
	// maxKey is the maximum length of an idempotency key in bytes.
	maxKey = 128
	// maxMcap, in msg/s, is far above any broker's capacity, and sums of it do not
	// overflow.
	maxMcap = 1_000_000_000
	// maxWatched is the maximum number of publishers in one Watch.
	maxWatched = 100_000
	// maxPaths is the maximum number of fields in an update, more than a topic has.
	maxPaths = 100
)

// checkCreate converts a request, or returns all its faults.
func checkCreate(req *srtmv1.CreateTopicRequest) (*catalog.Spec, error) {
	var bad faults
	if len(req.IdempotencyKey) > maxKey {
		bad.Add("idempotency_key", "has %d bytes, at most %d", len(req.IdempotencyKey), maxKey)
	}
	p := req.Spec
	if p == nil {
		bad.Add("spec", "is missing")
		return nil, bad
	}
	if req.MeasuredBrokerId != "" && (len(p.Publishers)+len(p.Groups) > 0 || req.IdempotencyKey != "") {
		bad.Add("measured_broker_id", "goes with neither publishers nor an idempotency_key")
	}
	if req.DryRun && (req.MeasuredBrokerId != "" || req.IdempotencyKey != "") {
		bad.Add("dry_run", "goes with neither measured_broker_id nor an idempotency_key")
	}
	spec := &catalog.Spec{
		Demand: placement.Demand{
			Topic:     p.Name,
			RateMilli: p.GetContract().GetRateMilli(),
			Burst:     p.GetContract().GetBurst(),
			Open:      len(p.Publishers)+len(p.Groups) == 0 && req.MeasuredBrokerId == "",
		},
		Policy: p.PlacementPolicy, ShareRule: p.ShareRule, Channels: p.Channels,
	}
	if spec.Policy == "" {
		spec.Policy = placement.SRTM
	}
	if spec.ShareRule == "" {
		spec.ShareRule = share.Default
	}
	bad.Name("spec.name", p.Name)
	if a := p.Auto; a != nil {
		spec.Auto = catalog.Auto{MaxRate: a.MaxRateMilli, MinBurst: max(a.MinBurst, 1), MaxBurst: a.MaxBurst, Measured: a.Measured}
		if a.MaxBurst == 0 {
			spec.Auto.MinBurst = 0
		}
		switch {
		case !spec.Demand.Open:
			bad.Add("spec.auto", "goes without publishers and groups")
		case a.MaxRateMilli == 0 && a.MaxBurst == 0:
			bad.Add("spec.auto", "has neither max_rate_milli nor max_burst")
		case a.MaxRateMilli < 0 || a.MaxRateMilli > int64(tokenbucket.MaxRate):
			bad.Add("spec.auto.max_rate_milli", "%d is outside 0 to %d", a.MaxRateMilli, tokenbucket.MaxRate)
		case a.MinBurst < 0 || a.MaxBurst < 0 || a.MinBurst > a.MaxBurst || a.MaxBurst > tokenbucket.MaxBurst:
			bad.Add("spec.auto.max_burst", "%d to %d messages are not within 1 to %d", a.MinBurst, a.MaxBurst, tokenbucket.MaxBurst)
		case p.Contract != nil:
			// An automatic contract begins at its limit.
			spec.Demand.RateMilli, spec.Demand.Burst = cmp.Or(spec.Demand.RateMilli, a.MaxRateMilli), cmp.Or(spec.Demand.Burst, a.MaxBurst)
			begin := proto.CloneOf(p.Contract)
			begin.RateMilli, begin.Burst = spec.Demand.RateMilli, spec.Demand.Burst
			p = proto.CloneOf(p)
			p.Contract = begin
			if a.MaxRateMilli > 0 && begin.RateMilli > a.MaxRateMilli {
				bad.Add("spec.contract.rate_milli", "%d is more than spec.auto.max_rate_milli", begin.RateMilli)
			}
			if a.MaxBurst > 0 && (begin.Burst > a.MaxBurst || begin.Burst < a.MinBurst) {
				bad.Add("spec.contract.burst", "%d is outside spec.auto's", begin.Burst)
			}
		}
	}
	contract := checkContract(&bad, p.Contract, spec)
	if contract {
		spec.Demand.Rate = (spec.Demand.RateMilli + 999) / 1000
	} else {
		// A valid rate: the following checks report other faults, and no second fault of the contract.
		spec.Demand.Rate, spec.Demand.RateMilli, spec.Demand.Burst = placement.MaxRate, 0, 1
	}

	if count := len(p.Publishers); count > placement.MaxPublishers {
		bad.Add("spec.publishers", "%d, at most %d", count, placement.MaxPublishers)
		return nil, bad // publishers are not checked one by one
	}
	spec.Demand.Publishers = make([]placement.Publisher, len(p.Publishers))
	for i, publisher := range p.Publishers {
		spec.Demand.Publishers[i] = placement.Publisher{
			ID: publisher.GetId(), Key: publisher.GetCorrelationKey(), Rate: publisher.GetRate(), Batch: int(publisher.GetBatch()),
		}
	}
	if len(p.Groups) > placement.MaxPublishers {
		bad.Add("spec.groups", "%d, at most %d", len(p.Groups), placement.MaxPublishers)
		return nil, bad
	}
	spec.Demand.Groups = make([]placement.Group, len(p.Groups))
	for i, group := range p.Groups {
		spec.Demand.Groups[i] = placement.Group{
			Key: group.GetKey(), Count: int(group.GetCount()), Rate: group.GetRate(), Batch: int(group.GetBatch()), Weight: int(group.GetWeight()),
		}
		if group.GetWeight() > math.MaxUint8 {
			bad.Add(fmt.Sprintf("spec.groups[%d].weight", i), "%d, at most %d", group.GetWeight(), math.MaxUint8)
		}
	}
	var fields placement.FieldErrors
	if errors.As(spec.Demand.Validate(), &fields) {
		for _, f := range fromPlacement(fields) {
			if f.Field != "spec.name" { // reported above
				bad = append(bad, f)
			}
		}
	}

	if !slices.Contains(placement.Policies(), spec.Policy) {
		bad.Add("spec.placement_policy", "%.80q is not one of %s", spec.Policy, strings.Join(placement.Policies(), ", "))
	}
	if len(p.Channels) > maxChannels {
		bad.Add("spec.channels", "%d, at most %d", len(p.Channels), maxChannels)
	} else {
		seen := map[string]bool{}
		for i, name := range p.Channels {
			if field := fmt.Sprintf("spec.channels[%d]", i); bad.Name(field, name) && seen[name] {
				bad.Add(field, "%q appears twice", name)
			}
			seen[name] = true
		}
	}
	var ok bool
	if spec.Pacing, ok = controller.Pacings.Value(p.Pacing); !ok {
		bad.Add("spec.pacing", "%d is no mode", p.Pacing)
	}
	if spec.Durability, ok = controller.Durabilities.Value(p.Durability); !ok {
		bad.Add("spec.durability", "%d is no durability", p.Durability)
	}
	checkExpiry(&bad, p, spec)
	if !slices.Contains(share.Rules(), spec.ShareRule) {
		bad.Add("spec.share_rule", "%.80q is not one of %s", spec.ShareRule, strings.Join(share.Rules(), ", "))
	}
	return spec, bad.Err()
}

// checkExpiry checks and converts the message expiry.
func checkExpiry(bad *faults, p *srtmv1.TopicSpec, spec *catalog.Spec) {
	if len(p.ChannelExpiry) > maxChannels {
		bad.Add("spec.channel_expiry", "%d channels, at most %d", len(p.ChannelExpiry), maxChannels)
		return
	}
	check := func(field string, p *srtmv1.Expiry, limits expiry.Settings) expiry.Settings {
		e := service.ExpiryOf(p)
		err := e.Validate(spec.Name())
		if err == nil && p.GetTtl() != nil {
			if err = p.Ttl.CheckValid(); err == nil && e.TTL == 0 {
				err = errors.New("ttl 0 is outside [1ms, 10 years]; leave ttl unset for no end")
			}
		}
		if err == nil && e.DeadLetter != "" && e.Within(limits).MaxAttempts == 0 {
			err = expiry.ErrNoAttempts
		}
		if err != nil {
			bad.Add(field, "%v", err)
		}
		return e
	}
	spec.Expiry = check("spec.expiry", p.Expiry, expiry.Settings{})
	for _, channel := range slices.Sorted(maps.Keys(p.ChannelExpiry)) {
		field := fmt.Sprintf("spec.channel_expiry[%q]", channel)
		if !wire.ValidChannelName(channel) {
			bad.Add(field, "is no channel's name")
			continue
		}
		if e := check(field, p.ChannelExpiry[channel], spec.Expiry); e.On() {
			if spec.ChannelExpiry == nil {
				spec.ChannelExpiry = make(map[string]expiry.Settings)
			}
			spec.ChannelExpiry[channel] = e
		}
	}
}

// checkUpdate returns all faults of a request, except faults of the resulting
// specification, which checkCreate finds.
func checkUpdate(req *srtmv1.UpdateTopicRequest) error {
	var bad faults
	if req.Spec == nil {
		bad.Add("spec", "is missing")
	} else {
		bad.Name("spec.name", req.Spec.Name)
	}
	switch paths := req.UpdateMask.GetPaths(); {
	case req.UpdateMask == nil:
	case len(paths) == 0 || len(paths) > maxPaths:
		bad.Add("update_mask", "has %d paths, want 1 to %d; without a mask the whole specification is replaced", len(paths), maxPaths)
	default:
		for i, path := range paths {
			if mask := (&fieldmaskpb.FieldMask{Paths: []string{path}}); path == "name" || !mask.IsValid(req.Spec) {
				bad.Add(fmt.Sprintf("update_mask.paths[%d]", i), "%.80q is no field of a specification that can be changed", path)
			}
		}
	}
	return bad.Err()
}

// checkSeek returns all faults of a request. The brokers check whether the channel
// exists.
func checkSeek(req *srtmv1.SeekChannelRequest) error {
	var bad faults
	if req.Topic == "" {
		bad.Add("topic", "is missing")
	}
	if req.Channel == "" || len(req.Channel) > 64 {
		bad.Add("channel", "has %d bytes: want 1 to 64", len(req.Channel))
	}
	switch to := req.To.GetTo().(type) {
	case nil:
		bad.Add("to", "is missing: begin, end, time or offset")
	case *srtmv1.Place_Time:
		if year := to.Time.AsTime().Year(); !to.Time.IsValid() || year < 1970 || year > 2200 {
			bad.Add("to.time", "is not a time in the years 1970 to 2200")
		}
	}
	return bad.Err()
}

// checkChannel returns all faults of a request that changes a channel.
func checkChannel(topic, channel string) error {
	var bad faults
	if topic == "" {
		bad.Add("topic", "is missing")
	}
	bad.Name("channel", channel)
	return bad.Err()
}

// checkProfile returns the goal of a profile, or all faults of a request.
func checkProfile(req *srtmv1.ProfileTopicRequest) (sizing.Wanted, error) {
	var bad faults
	bad.Name("name", req.Name)
	if d := req.Lasts.AsDuration(); req.Lasts.CheckValid() != nil || d < 10*time.Second || d > 24*time.Hour {
		bad.Add("lasts", "%v is not 10s to 24h", d)
	}
	w := sizing.Wanted{
		Quantile: req.Quantile, Within: req.Within.AsDuration(), Confidence: req.Confidence,
		Headroom: req.Headroom, Brokers: int(min(req.Brokers, sizing.MaxBrokers+1)),
	}
	for field, problem := range w.Faults() {
		bad.Add(field, "%s", problem)
	}
	return w, bad.Err()
}

// checkContract converts the contract and reports whether r and b are valid.
func checkContract(bad *faults, p *srtmv1.Contract, spec *catalog.Spec) (sound bool) {
	if p == nil {
		bad.Add("spec.contract", "is missing")
		return false
	}
	sound = true
	if r := p.RateMilli; r < int64(tokenbucket.MinRate) || r > int64(tokenbucket.MaxRate) {
		bad.Add("spec.contract.rate_milli", "%s msg/s is outside %s to %s msg/s", tokenbucket.Rate(r).Text(), tokenbucket.MinRate.Text(), tokenbucket.MaxRate.Text())
		sound = false
	}
	if b := p.Burst; b < tokenbucket.MinBurst || b > tokenbucket.MaxBurst {
		bad.Add("spec.contract.burst", "%d messages is outside %d to %d", b, tokenbucket.MinBurst, tokenbucket.MaxBurst)
		sound = false
	}
	slo := topics.CompleteSLO(p.Slo)
	if q := slo.Quantile; !(q > 0 && q < 1) { // NaN too
		bad.Add("spec.contract.slo.quantile", "%v is not between 0 and 1", q)
	}
	err := slo.Latency.CheckValid()
	if err == nil {
		err = topics.CheckLatency(slo.Latency.AsDuration())
	}
	if err != nil {
		bad.Add("spec.contract.slo.latency", "%v", err)
	}
	spec.SLO = catalog.SLO{Quantile: slo.Quantile, Latency: slo.Latency.AsDuration()}
	var ok bool
	if spec.OverLimit, ok = controller.OverLimits.Value(p.OverLimit); !ok {
		bad.Add("spec.contract.over_limit", "%d is no policy", p.OverLimit)
	}
	return sound
}

// checkHello returns all faults of a broker's hello.
func checkHello(h *srtmv1.BrokerHello) error {
	var bad faults
	bad.Name("hello.broker_id", h.BrokerId)
	if h.Instance == "" || len(h.Instance) > 128 {
		bad.Add("hello.instance", "has %d bytes: want 1 to 128", len(h.Instance))
	}
	if _, _, err := controller.HostPort(h.TcpAddress); err != nil {
		bad.Add("hello.tcp_address", "%v", err)
	}
	if _, _, err := controller.HostPort(h.HttpAddress); err != nil {
		bad.Add("hello.http_address", "%v", err)
	}
	if len(h.Version) > 128 {
		bad.Add("hello.version", "has %d bytes, at most 128", len(h.Version))
	}
	if h.Mcap < 1 || h.Mcap > maxMcap {
		bad.Add("hello.mcap", "%d msg/s is outside 1 to %d", h.Mcap, maxMcap)
	}
	controller.PlaceOf(h).Check(bad.Add)
	return bad.Err()
}
