package rpc

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math"
	"slices"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/expiry"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/internal/topics"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// CreateTopic implements srtmv1.AdminServiceServer.
func (s *Server) CreateTopic(req *srtmv1.CreateTopicRequest, stream grpc.ServerStreamingServer[srtmv1.CreateTopicResponse]) error {
	spec, err := checkCreate(s.limited(req))
	if err == nil {
		err = s.permit(stream.Context())
	}
	if err != nil {
		return toStatus(err)
	}
	spec.Tenant = secure.Tenant(stream.Context())
	if req.DryRun {
		plan, err := s.controller.Plan(spec)
		if err != nil {
			return toStatus(err)
		}
		p := &srtmv1.Topic{Spec: specProto(spec), State: srtmv1.TopicState_TOPIC_STATE_PLACING}
		for _, q := range plan.Quotas {
			p.Quotas = append(p.Quotas, quotaProto(q, spec.Demand))
		}
		return stream.Send(&srtmv1.CreateTopicResponse{State: p.State, Message: "a dry run: nothing was done", Topic: p})
	}
	topic, err := s.controller.Create(stream.Context(), spec, req.IdempotencyKey, req.MeasuredBrokerId, func(p controller.Progress) error {
		state := srtmv1.TopicState_TOPIC_STATE_PREPARING
		if p.Placing {
			state = srtmv1.TopicState_TOPIC_STATE_PLACING
		}
		return stream.Send(&srtmv1.CreateTopicResponse{State: state, Message: p.Message})
	})
	if err != nil {
		return toStatus(err)
	}
	p := s.topicNow(stream.Context(), topic)
	return stream.Send(&srtmv1.CreateTopicResponse{State: p.State, Message: p.Reason, Topic: p})
}

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

// Reservation is the contract of a topic created without r and b, until the topic's
// traffic is measured.
type Reservation struct {
	Rate, Burst int64 // messages per second; messages
}

// DefaultReservation is the reservation of a Server unless Reserve changes it. It is a
// small part of a broker's default capacity, and enough for publishing a file by hand.
var DefaultReservation = Reservation{Rate: 1000, Burst: 1000}

// Faults yields all invalid fields of the reservation with their problems.
func (r Reservation) Faults() iter.Seq2[string, string] {
	return func(yield func(string, string) bool) {
		if r.Rate < 1 || r.Rate > placement.MaxRate {
			if !yield("rate", fmt.Sprintf("%d: want 1 to %d msg/s", r.Rate, placement.MaxRate)) {
				return
			}
		}
		if r.Burst < 1 || r.Burst > tokenbucket.MaxBurst {
			yield("burst", fmt.Sprintf("%d: want 1 to %d messages", r.Burst, tokenbucket.MaxBurst))
		}
	}
}

// Reserve sets the contract of topics created without a contract. Call it before
// Register.
func (s *Server) Reserve(r Reservation) { s.reservation = r }

// limited completes a creation without r and b. The contract begins with s.reservation
// and then follows measurements. The limit is half of the largest broker's capacity, with
// a burst of one second at this rate. A smaller broker also bounds the initial contract.
func (s *Server) limited(req *srtmv1.CreateTopicRequest) *srtmv1.CreateTopicRequest {
	spec := req.GetSpec()
	if c := spec.GetContract(); spec == nil || c.GetRateMilli() != 0 || c.GetBurst() != 0 || spec.Auto != nil ||
		len(spec.Publishers)+len(spec.Groups) > 0 || req.MeasuredBrokerId != "" {
		return req
	}
	largest := int64(0)
	for _, b := range s.view.Brokers() {
		if b.Connected && !b.Draining {
			largest = max(largest, b.Mcap)
		}
	}
	limit := max(largest/2, 1)
	if largest == 0 { // placement will refuse without a broker
		limit = s.reservation.Rate
	}
	return withReservation(req, s.reservation, limit)
}

// withReservation returns a creation whose contract begins with a reservation and then follows
// measurements. The limit is maxRate messages per second and a burst of one second at this
// rate, or the request's auto contract.
func withReservation(req *srtmv1.CreateTopicRequest, reservation Reservation, maxRate int64) *srtmv1.CreateTopicRequest {
	req = proto.CloneOf(req)
	if req.Spec.Contract == nil {
		req.Spec.Contract = &srtmv1.Contract{}
	}
	c := req.Spec.Contract
	if c.RateMilli != 0 || c.Burst != 0 {
		return req
	}
	if req.Spec.Auto == nil {
		req.Spec.Auto = &srtmv1.AutoContract{MaxRateMilli: 1000 * maxRate, MinBurst: 1, MaxBurst: min(maxRate, tokenbucket.MaxBurst)}
	}
	c.RateMilli, c.Burst = 1000*min(reservation.Rate, maxRate), min(reservation.Burst, maxRate)
	if a := req.Spec.Auto; a.MaxRateMilli > 0 {
		c.RateMilli = min(c.RateMilli, a.MaxRateMilli)
	}
	if a := req.Spec.Auto; a.MaxBurst > 0 {
		c.Burst = min(max(c.Burst, a.MinBurst), a.MaxBurst)
	}
	return req
}
