package rpc

import (
	"errors"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
)

func validRequest() *srtmv1.CreateTopicRequest {
	return &srtmv1.CreateTopicRequest{
		IdempotencyKey: "key",
		Spec: &srtmv1.TopicSpec{
			Name: "t",
			Contract: &srtmv1.Contract{
				RateMilli: 100_500, Burst: 40, Slo: &srtmv1.Slo{Quantile: 0.99, Latency: durationpb.New(5 * time.Millisecond)},
				OverLimit: srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_REJECT,
			},
			Publishers:      []*srtmv1.Publisher{{Id: "p", CorrelationKey: "g", Rate: 1.5, Batch: 3}},
			Groups:          []*srtmv1.PublisherGroup{{Key: "g", Count: 9, Rate: 10}, {Count: 2, Rate: 1, Batch: 2}},
			PlacementPolicy: "conc", ShareRule: "proportional", Pacing: srtmv1.PacingMode_PACING_MODE_POLICE, Channels: []string{"a", "b"},
		},
	}
}

func TestAGoodRequest(t *testing.T) {
	got := testkit.Result(checkCreate(validRequest())).Must(t)
	want := &catalog.Spec{
		Demand: placement.Demand{
			Topic: "t", Rate: 101, RateMilli: 100_500, Burst: 40,
			Publishers: []placement.Publisher{{ID: "p", Key: "g", Rate: 1.5, Batch: 3}},
			Groups:     []placement.Group{{Key: "g", Count: 9, Rate: 10}, {Count: 2, Rate: 1, Batch: 2}},
		},
		SLO: catalog.SLO{Quantile: 0.99, Latency: 5 * time.Millisecond}, OverLimit: catalog.Reject,
		Policy: "conc", ShareRule: "proportional", Pacing: catalog.PacingPolice, Channels: []string{"a", "b"},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	decoded := specProto(got)
	decoded.Publishers = publishersProto(declared(got))
	if !proto.Equal(decoded, validRequest().Spec) {
		t.Errorf("back again: %v\nwant %v", decoded, validRequest().Spec)
	}
}

func TestRequestGetsDefaults(t *testing.T) {
	req := validRequest()
	req.Spec.PlacementPolicy, req.Spec.ShareRule, req.Spec.Contract.OverLimit = "", "", 0
	got := testkit.Result(checkCreate(req)).Must(t)
	if got.Policy != "srtm" || got.ShareRule != "sqrt" || got.OverLimit != catalog.Delay {
		t.Errorf("got %s, %s, %v", got.Policy, got.ShareRule, got.OverLimit)
	}
}

func TestFaultsOfARequest(t *testing.T) {
	many := func(n int) []*srtmv1.Publisher {
		return slices.Repeat([]*srtmv1.Publisher{{Id: "p", Rate: 1}}, n) // the publishers are not checked one by one
	}
	type spec = srtmv1.TopicSpec
	for _, test := range []struct {
		name   string
		spoil  func(*spec)
		fields []string
	}{
		{"no name", func(s *spec) { s.Name = "" }, []string{"spec.name"}},
		{"a name with a space", func(s *spec) { s.Name = "a b" }, []string{"spec.name"}},
		{"a long name", func(s *spec) { s.Name = strings.Repeat("x", 65) }, []string{"spec.name"}},
		{"no contract", func(s *spec) { s.Contract = nil }, []string{"spec.contract"}},
		{"r of 0", func(s *spec) { s.Contract.RateMilli = 0 }, []string{"spec.contract.rate_milli"}},
		{"r below 0", func(s *spec) { s.Contract.RateMilli = -5 }, []string{"spec.contract.rate_milli"}},
		{"r beyond all", func(s *spec) { s.Contract.RateMilli = math.MaxInt64 }, []string{"spec.contract.rate_milli"}},
		{"b of 0", func(s *spec) { s.Contract.Burst = 0 }, []string{"spec.contract.burst"}},
		{"b beyond all", func(s *spec) { s.Contract.Burst = math.MaxInt64 }, []string{"spec.contract.burst"}},
		{"no SLO, which has a default", func(s *spec) { s.Contract.Slo = nil }, nil},
		{"no quantile, which has a default", func(s *spec) { s.Contract.Slo.Quantile = 0 }, nil},
		{"a quantile below 0", func(s *spec) { s.Contract.Slo.Quantile = -0.1 }, []string{"spec.contract.slo.quantile"}},
		{"a quantile of 1", func(s *spec) { s.Contract.Slo.Quantile = 1 }, []string{"spec.contract.slo.quantile"}},
		{"a quantile that is no number", func(s *spec) { s.Contract.Slo.Quantile = math.NaN() }, []string{"spec.contract.slo.quantile"}},
		{"no latency, which has a default", func(s *spec) { s.Contract.Slo.Latency = nil }, nil},
		{"a latency below what a broker measures", func(s *spec) { s.Contract.Slo.Latency = durationpb.New(99 * time.Microsecond) }, []string{"spec.contract.slo.latency"}},
		{"a latency above what a broker measures", func(s *spec) { s.Contract.Slo.Latency = durationpb.New(61 * time.Second) }, []string{"spec.contract.slo.latency"}},
		{"a latency of 0", func(s *spec) { s.Contract.Slo.Latency = durationpb.New(0) }, []string{"spec.contract.slo.latency"}},
		{"a latency below 0", func(s *spec) { s.Contract.Slo.Latency = durationpb.New(-1) }, []string{"spec.contract.slo.latency"}},
		{"a latency of hours", func(s *spec) { s.Contract.Slo.Latency = durationpb.New(time.Hour) }, []string{"spec.contract.slo.latency"}},
		{"a latency that is none", func(s *spec) { s.Contract.Slo.Latency = &durationpb.Duration{Seconds: 1, Nanos: -1} }, []string{"spec.contract.slo.latency"}},
		{"no such policy over the limit", func(s *spec) { s.Contract.OverLimit = 9 }, []string{"spec.contract.over_limit"}},
		{"more than the contract's rate", func(s *spec) { s.Groups[0].Rate = 11 }, []string{"spec.contract.rate_milli"}},
		{"just the contract's rate", func(s *spec) { s.Contract.RateMilli = 93_500 }, nil},
		{"duplicate publishers", func(s *spec) { s.Publishers = append(s.Publishers, s.Publishers[0]) }, []string{"spec.publishers[1].id"}},
		{"a publisher that is in a group", func(s *spec) { s.Publishers[0].Id = "g.3" }, []string{"spec.publishers[0].id"}},
		{"a publisher without an id", func(s *spec) { s.Publishers[0].Id = "" }, []string{"spec.publishers[0].id"}},
		{"a long id", func(s *spec) { s.Publishers[0].Id = strings.Repeat("x", 65) }, []string{"spec.publishers[0].id"}},
		{"a long key", func(s *spec) { s.Publishers[0].CorrelationKey = strings.Repeat("x", 65) }, []string{"spec.publishers[0].correlation_key"}},
		{"a publisher that never sends", func(s *spec) { s.Publishers[0].Rate = 0 }, []string{"spec.publishers[0].rate"}},
		{"a publisher with an infinite rate", func(s *spec) { s.Publishers[0].Rate = math.Inf(1) }, []string{"spec.publishers[0].rate"}},
		{"a negative batch", func(s *spec) { s.Publishers[0].Batch = -1 }, []string{"spec.publishers[0].batch"}},
		{"an empty group", func(s *spec) { s.Groups[1].Count = 0 }, []string{"spec.groups[1].count"}},
		{"two groups of one key", func(s *spec) { s.Groups[1].Key = "g" }, []string{"spec.groups[1].key"}},
		{"too many publishers", func(s *spec) { s.Publishers = many(placement.MaxPublishers + 1) }, []string{"spec.publishers"}},
		{"too many with those of the groups", func(s *spec) {
			s.Contract.RateMilli = 1e12
			s.Groups[0].Count, s.Groups[1].Count = placement.MaxPublishers, 1
			s.Groups[0].Rate = 1
		}, []string{"spec.publishers"}},
		{"no such policy", func(s *spec) { s.PlacementPolicy = "best" }, []string{"spec.placement_policy"}},
		{"a dead letter topic without attempts", func(s *spec) { s.Expiry = &srtmv1.Expiry{DeadLetterTopic: "d"} }, []string{"spec.expiry"}},
		{"a dead letter topic that is itself", func(s *spec) { s.Expiry = &srtmv1.Expiry{MaxAttempts: 1, DeadLetterTopic: s.Name} }, []string{"spec.expiry"}},
		{"a ttl of 0", func(s *spec) { s.Expiry = &srtmv1.Expiry{Ttl: durationpb.New(0)} }, []string{"spec.expiry"}},
		{"more attempts than are counted", func(s *spec) { s.Expiry = &srtmv1.Expiry{MaxAttempts: 65536} }, []string{"spec.expiry"}},
		{"a channel's dead letter topic by the topic's attempts", func(s *spec) {
			s.Expiry = &srtmv1.Expiry{MaxAttempts: 3}
			s.ChannelExpiry = map[string]*srtmv1.Expiry{"c": {DeadLetterTopic: "d"}}
		}, nil},
		{"settings of what is no channel", func(s *spec) { s.ChannelExpiry = map[string]*srtmv1.Expiry{"a b": {MaxAttempts: 1}} }, []string{`spec.channel_expiry["a b"]`}},
		{"no such rule", func(s *spec) { s.ShareRule = "best" }, []string{"spec.share_rule"}},
		{"no such pacing", func(s *spec) { s.Pacing = 9 }, []string{"spec.pacing"}},
		{"a weight that is too great", func(s *spec) { s.Groups[1].Weight = 256 }, []string{"spec.groups[1].weight"}},
		{"bad channels", func(s *spec) { s.Channels = []string{"a", "", "a", "x y"} }, []string{"spec.channels[1]", "spec.channels[2]", "spec.channels[3]"}},
		{"too many channels", func(s *spec) { s.Channels = make([]string, maxChannels+1) }, []string{"spec.channels"}},
		{"everything at once", func(s *spec) {
			s.Name, s.PlacementPolicy, s.ShareRule = "!", "x", "y"
			s.Contract = &srtmv1.Contract{}
			s.Publishers[0].Rate = -1
			s.Groups[0].Count = -1
			s.Channels = []string{"!"}
		}, []string{
			"spec.name", "spec.contract.rate_milli", "spec.contract.burst", "spec.publishers[0].rate",
			"spec.groups[0].count", "spec.placement_policy", "spec.channels[0]", "spec.share_rule",
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			req := validRequest()
			test.spoil(req.Spec)
			_, err := checkCreate(req)
			testkit.EqualSlices(t, fieldsOf(err), test.fields, "faults in %v", err)
		})
	}
	if got := fieldsOf(second(checkCreate(&srtmv1.CreateTopicRequest{IdempotencyKey: strings.Repeat("k", 129)}))); !slices.Equal(got, []string{"idempotency_key", "spec"}) {
		t.Errorf("a request without a specification: faults in %q", got)
	}
}

func TestFaultsOfAHello(t *testing.T) {
	hello := func() *srtmv1.BrokerHello {
		return &srtmv1.BrokerHello{BrokerId: "b", Instance: "i", TcpAddress: "h:1", HttpAddress: "[::1]:2", Mcap: 1}
	}
	if err := checkHello(hello()); err != nil {
		t.Errorf("a good one: %v", err)
	}
	for field, spoil := range map[string]func(*srtmv1.BrokerHello){
		"hello.broker_id":     func(h *srtmv1.BrokerHello) { h.BrokerId = "a b" },
		"hello.instance":      func(h *srtmv1.BrokerHello) { h.Instance = "" },
		"hello.tcp_address":   func(h *srtmv1.BrokerHello) { h.TcpAddress = "h" },
		"hello.http_address":  func(h *srtmv1.BrokerHello) { h.HttpAddress = "h:65536" },
		"hello.mqtt_address":  func(h *srtmv1.BrokerHello) { h.MqttAddress = ":1883" },
		"hello.mqtts_address": func(h *srtmv1.BrokerHello) { h.MqttsAddress = "h" },
		"hello.version":       func(h *srtmv1.BrokerHello) { h.Version = strings.Repeat("v", 129) },
		"hello.mcap":          func(h *srtmv1.BrokerHello) { h.Mcap = 0 },
		"hello.hostname":      func(h *srtmv1.BrokerHello) { h.Hostname = strings.Repeat("h", 256) },
		"hello.data_path":     func(h *srtmv1.BrokerHello) { h.DataPath = strings.Repeat("d", 4097) },
		"hello.lock":          func(h *srtmv1.BrokerHello) { h.Lock = strings.Repeat("l", 256) },
	} {
		h := hello()
		spoil(h)
		if got := fieldsOf(checkHello(h)); !slices.Equal(got, []string{field}) {
			t.Errorf("faults in %q, want %q", got, field)
		}
	}
	if got := fieldsOf(checkHello(&srtmv1.BrokerHello{})); len(got) != 5 {
		t.Errorf("an empty one: faults in %q, want 5", got)
	}
}

func second(_ *catalog.Spec, err error) error { return err }

func fieldsOf(err error) []string {
	var bad faults
	errors.As(err, &bad)
	var fields []string
	for _, f := range bad {
		fields = append(fields, f.Field)
	}
	return fields
}

// A contract that an update names is fixed. It follows measurements only if the update has that, too,
// or names neither the rate nor the burst.
func TestAContractThatIsNamedIsFixed(t *testing.T) {
	for path, valid := range map[string]bool{
		"contract.rate_milli": false, "contract.burst": false, "contract": false,
		"contract.slo.latency": true, "contract.slo": true, "channels": true, "contract.rate_milli,auto": true, "contract,auto.max_burst": true,
	} {
		present := &catalog.Spec{
			Demand: placement.Demand{Topic: "t", Rate: 1, RateMilli: 1000, Burst: 1, Open: true},
			SLO:    catalog.SLO{Quantile: 0.99, Latency: time.Second}, Policy: placement.SRTM, ShareRule: "static", Auto: catalog.Auto{MaxRate: 5000, MinBurst: 1, MaxBurst: 7},
		}
		got := updated(present, &srtmv1.UpdateTopicRequest{
			Spec:       &srtmv1.TopicSpec{Contract: &srtmv1.Contract{RateMilli: 2000, Burst: 2}, Auto: &srtmv1.AutoContract{MaxRateMilli: 5000, MaxBurst: 7}},
			UpdateMask: &fieldmaskpb.FieldMask{Paths: strings.Split(path, ",")},
		})
		testkit.Equal(t, got.Auto != nil, valid, "a contract follows after an update of %s", path)
	}
}
