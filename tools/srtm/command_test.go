package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
	"github.com/srtm-io/srtm/internal/topics"
)

func TestMain(m *testing.M) { localtest.Main(m) }

// admin answers like a loaddistributor and records its requests.
type admin struct {
	srtmv1.UnimplementedAdminServiceServer
	created    *srtmv1.CreateTopicRequest
	deleted    string
	delete     func(topic string) // nil: no further effect
	updated    *srtmv1.UpdateTopicRequest
	moved      *srtmv1.MovePublishersRequest
	changed    []string // channels
	drained    *srtmv1.DrainBrokerRequest
	set        *srtmv1.SetBrokerCapacityRequest
	brokers    []*srtmv1.Broker // nil: the brokers of the golden files
	refuse     error
	sought     []*srtmv1.SeekChannelRequest
	publishers []string // of the topic; a page has one publisher
	lowering   int      // number of looks at which the topic is still lowering
	says       string   // message while a topic is created
}

func (a *admin) CreateTopic(r *srtmv1.CreateTopicRequest, s grpc.ServerStreamingServer[srtmv1.CreateTopicResponse]) error {
	a.created = r
	if a.refuse != nil {
		return a.refuse
	}
	if err := s.Send(&srtmv1.CreateTopicResponse{State: srtmv1.TopicState_TOPIC_STATE_PLACING, Message: cmp.Or(a.says, "2 brokers")}); err != nil {
		return err
	}
	t := topic()
	t.Spec = proto.Clone(r.GetSpec()).(*srtmv1.TopicSpec)
	return s.Send(&srtmv1.CreateTopicResponse{State: t.GetState(), Topic: t})
}

func (a *admin) GetTopic(_ context.Context, r *srtmv1.GetTopicRequest) (*srtmv1.GetTopicResponse, error) {
	if r.GetName() != "sensors" {
		return nil, status.Errorf(codes.NotFound, "no topic %q", r.GetName())
	}
	t := a.lowered(topic())
	if r.GetPageSize() > 0 && len(a.publishers) > 0 { // pages of one publisher
		n, _ := strconv.Atoi(r.GetPageToken())
		next := ""
		if n+1 < len(a.publishers) {
			next = strconv.Itoa(n + 1)
		}
		t.Spec.Publishers = []*srtmv1.Publisher{{Id: a.publishers[n]}}
		return &srtmv1.GetTopicResponse{Topic: t, NextPageToken: next}, nil
	}
	return &srtmv1.GetTopicResponse{Topic: t}, nil
}

func (a *admin) ListTopics(_ context.Context, r *srtmv1.ListTopicsRequest) (*srtmv1.ListTopicsResponse, error) {
	t := topic()
	if r.GetPageToken() == "" {
		return &srtmv1.ListTopicsResponse{Topics: []*srtmv1.Topic{t}, NextPageToken: "more"}, nil
	}
	t.Spec.Name, t.State, t.Reason = "valves", srtmv1.TopicState_TOPIC_STATE_DEGRADED, "broker b2 is gone"
	return &srtmv1.ListTopicsResponse{Topics: []*srtmv1.Topic{t}}, nil
}

func (a *admin) DeleteTopic(_ context.Context, r *srtmv1.DeleteTopicRequest) (*srtmv1.DeleteTopicResponse, error) {
	a.deleted = r.GetName()
	if a.delete != nil {
		a.delete(a.deleted)
	}
	return &srtmv1.DeleteTopicResponse{Lowering: a.lowered(topic()).Lowering}, nil
}

func (a *admin) UpdateTopic(_ context.Context, r *srtmv1.UpdateTopicRequest) (*srtmv1.UpdateTopicResponse, error) {
	a.updated = r
	return &srtmv1.UpdateTopicResponse{Topic: a.lowered(topic())}, nil
}

// lowered marks the topic as lowering for as many looks as the test wants.
func (a *admin) lowered(t *srtmv1.Topic) *srtmv1.Topic {
	if a.lowering > 0 {
		a.lowering--
		t.Lowering = &srtmv1.Lowering{Brokers: []*srtmv1.UnconfirmedShare{
			{BrokerId: "b1", Share: &srtmv1.Share{RateMilli: 50_000, Burst: 5}, Policy: srtmv1.LeasePolicy_LEASE_POLICY_STRICT, Until: timestamppb.New(time.Unix(1_795_000_000, 0)), MostMessages: 1234},
			{BrokerId: "b2", Share: &srtmv1.Share{RateMilli: 2_500, Burst: 1}, Policy: srtmv1.LeasePolicy_LEASE_POLICY_AVAILABLE},
		}}
		t.State, t.Reason = srtmv1.TopicState_TOPIC_STATE_LOWERING, topics.Lowering(t.Lowering)
	}
	return t
}

func (a *admin) ListChannels(context.Context, *srtmv1.ListChannelsRequest) (*srtmv1.ListChannelsResponse, error) {
	return &srtmv1.ListChannelsResponse{Channels: []*srtmv1.TopicChannel{{Name: "alerts", Paused: true}, {Name: "billing"}}}, a.refuse
}

func (a *admin) PauseChannel(_ context.Context, r *srtmv1.PauseChannelRequest) (*srtmv1.PauseChannelResponse, error) {
	a.changed = append(a.changed, "pause "+r.GetTopic()+" "+r.GetChannel())
	return &srtmv1.PauseChannelResponse{Pending: []string{"b2", "b3"}}, a.refuse
}

func (a *admin) CreateChannel(_ context.Context, r *srtmv1.CreateChannelRequest) (*srtmv1.CreateChannelResponse, error) {
	a.changed = append(a.changed, "create "+r.GetTopic()+" "+r.GetChannel())
	return &srtmv1.CreateChannelResponse{}, a.refuse
}

func (a *admin) UnpauseChannel(_ context.Context, r *srtmv1.UnpauseChannelRequest) (*srtmv1.UnpauseChannelResponse, error) {
	a.changed = append(a.changed, "unpause "+r.GetTopic()+" "+r.GetChannel())
	return &srtmv1.UnpauseChannelResponse{}, a.refuse
}

func (a *admin) DeleteChannel(_ context.Context, r *srtmv1.DeleteChannelRequest) (*srtmv1.DeleteChannelResponse, error) {
	a.changed = append(a.changed, "delete "+r.GetTopic()+" "+r.GetChannel())
	return &srtmv1.DeleteChannelResponse{}, a.refuse
}

func (a *admin) EmptyChannel(_ context.Context, r *srtmv1.EmptyChannelRequest) (*srtmv1.EmptyChannelResponse, error) {
	a.changed = append(a.changed, "empty "+r.GetTopic()+" "+r.GetChannel())
	return &srtmv1.EmptyChannelResponse{Brokers: []*srtmv1.SeekOutcome{{BrokerId: "b1"}, {BrokerId: "b2", Reason: "BROKER_FAILED", Error: "it left"}}}, a.refuse
}

func (a *admin) MovePublishers(_ context.Context, r *srtmv1.MovePublishersRequest) (*srtmv1.MovePublishersResponse, error) {
	a.moved = r
	return &srtmv1.MovePublishersResponse{Topic: topic()}, nil
}

func (a *admin) SeekChannel(_ context.Context, r *srtmv1.SeekChannelRequest) (*srtmv1.SeekChannelResponse, error) {
	a.sought = append(a.sought, r)
	if a.refuse != nil {
		return nil, a.refuse
	}
	return &srtmv1.SeekChannelResponse{Brokers: []*srtmv1.SeekOutcome{
		{BrokerId: "b1", Offset: 7}, {BrokerId: "b2", Reason: "CHANNEL_UNKNOWN", Error: "no such channel"},
	}}, nil
}

func (*admin) RemoveBroker(context.Context, *srtmv1.RemoveBrokerRequest) (*srtmv1.RemoveBrokerResponse, error) {
	return &srtmv1.RemoveBrokerResponse{
		Freed: []*srtmv1.FreedShare{{Topic: "sensors", Share: &srtmv1.Share{RateMilli: 440_000, Burst: 12}}}, Left: []string{"pumps", "valves"},
	}, nil
}

// DrainBroker reports a topic; the next ListBrokers has none.
func (a *admin) DrainBroker(_ context.Context, r *srtmv1.DrainBrokerRequest) (*srtmv1.DrainBrokerResponse, error) {
	a.drained = r
	b := &srtmv1.Broker{Id: r.GetBrokerId(), Draining: !r.GetUndo(), Topics: []string{"sensors"}}
	if len(a.brokers) > 0 && !a.brokers[0].GetSafeToStop() && !r.GetUndo() {
		b = a.brokers[0]
	}
	if r.GetForce() {
		b.Waits = []*srtmv1.DrainWait{{Topic: "sensors", Reason: "consumers", Remedy: "connect some"}}
	}
	return &srtmv1.DrainBrokerResponse{Broker: b}, nil
}

func (a *admin) SetBrokerCapacity(_ context.Context, r *srtmv1.SetBrokerCapacityRequest) (*srtmv1.SetBrokerCapacityResponse, error) {
	a.set = r
	return &srtmv1.SetBrokerCapacityResponse{Broker: &srtmv1.Broker{
		Id: r.GetBrokerId(), Mcap: cmp.Or(r.GetMcap(), 20_000), ConfiguredMcap: 20_000, CalibratedMcap: r.GetMcap(),
	}}, nil
}

func (a *admin) ListBrokers(context.Context, *srtmv1.ListBrokersRequest) (*srtmv1.ListBrokersResponse, error) {
	if a.brokers != nil {
		return &srtmv1.ListBrokersResponse{Brokers: a.brokers}, nil
	}
	return &srtmv1.ListBrokersResponse{Brokers: []*srtmv1.Broker{
		{Id: "b1", TcpAddress: "h:4150", HttpAddress: "h:4151", MqttAddress: "h:1883", MqttsAddress: "h:8883", Mcap: 20_000, Allocated: 11_000, Connected: true, Version: "0.1.0"},
		{Id: "b2", TcpAddress: "h:4250", HttpAddress: "h:4251", Mcap: 18_500, ConfiguredMcap: 20_000, CalibratedMcap: 18_500, Version: "0.1.0"},
	}}, nil
}

// grants is an adaptor with one topic. One of the topic's brokers is dead.
type grants struct {
	srtmv1.UnimplementedGrantServiceServer
}

func (grants) ListShares(_ context.Context, r *srtmv1.ListSharesRequest) (*srtmv1.ListSharesResponse, error) {
	share := func(rate, burst int64) *srtmv1.Share { return &srtmv1.Share{RateMilli: rate, Burst: burst} }
	t := &srtmv1.TopicShares{Topic: "sensors", ShareRule: "robust", Members: []*srtmv1.MemberShare{
		{
			BrokerId: "b1", Acknowledged: share(7_000_500, 20), AcknowledgedEpoch: 17, Base: share(5_600_400, 16),
			Target: share(7_000_500, 20), Reserved: share(7_000_500, 20), Connected: true,
			Policy: srtmv1.LeasePolicy_LEASE_POLICY_AVAILABLE,
		},
		{BrokerId: "b2", AcknowledgedEpoch: 9, Reserved: share(2_400_000, 7), Lapsed: true, Policy: srtmv1.LeasePolicy_LEASE_POLICY_STRICT},
	}}
	history := []*srtmv1.ShareChange{
		{Time: &timestamppb.Timestamp{Seconds: 1_700_000_000}, BrokerId: "b1", Event: "granted", Reason: "contract", Share: share(6_000_000, 17), Epoch: 15, TokensMilli: 17_000},
		{Time: &timestamppb.Timestamp{Seconds: 1_700_000_003, Nanos: 5e8}, BrokerId: "b2", Event: "lapsed", Reason: "lease", Share: share(2_400_000, 7), Epoch: 9},
		{Time: &timestamppb.Timestamp{Seconds: 1_700_000_004}, BrokerId: "b1", Event: "granted", Reason: "rule", Share: share(7_000_500, 20), Flex: share(1_400_100, 4), Epoch: 17, TokensMilli: 1_500},
	}
	if r.Topic == t.Topic {
		t.History = history[max(0, len(history)-int(r.History)):]
	}
	return &srtmv1.ListSharesResponse{Topics: []*srtmv1.TopicShares{t}}, nil
}

func (grants) ForgetBroker(_ context.Context, r *srtmv1.ForgetBrokerRequest) (*srtmv1.ForgetBrokerResponse, error) {
	if r.BrokerId != "b2" {
		return nil, status.Errorf(codes.FailedPrecondition, "forget broker %q: the broker is connected", r.BrokerId)
	}
	return &srtmv1.ForgetBrokerResponse{Freed: []*srtmv1.FreedShare{
		{Topic: "sensors", Share: &srtmv1.Share{RateMilli: 440_000, Burst: 12}}, {Topic: "valves"},
	}}, nil
}

func topic() *srtmv1.Topic {
	l := histogram.NewLatency()
	for range 100 {
		l.Record(700 * time.Microsecond)
	}
	stats := &srtmv1.TopicStats{
		Interval: durationpb.New(10 * time.Second), Offered: 99_000, Delivered: 100_000, Exceeded: 500,
		Access: obs.LatencyProto(l), Delivery: obs.LatencyProto(l),
	}
	met, ofAll, ofB1 := true, 0.8125, 0.75
	return &srtmv1.Topic{
		Spec: &srtmv1.TopicSpec{
			Name: "sensors",
			Contract: &srtmv1.Contract{
				RateMilli: 11_000_500, Burst: 30,
				Slo: &srtmv1.Slo{Quantile: 0.99, Latency: durationpb.New(time.Millisecond)},
			},
		},
		State: srtmv1.TopicState_TOPIC_STATE_ACTIVE,
		Epoch: 3,
		Quotas: []*srtmv1.BrokerQuota{
			{BrokerId: "b1", Rate: 6000, Publishers: 600, Share: &srtmv1.Share{RateMilli: 6_000_500, Burst: 17}},
			{BrokerId: "b2", Rate: 5000, Publishers: 400, Share: &srtmv1.Share{RateMilli: 5_000_000, Burst: 13}},
		},
		Status: &srtmv1.TopicStatus{
			Window: durationpb.New(10 * time.Second),
			Brokers: []*srtmv1.BrokerTopicStatus{
				{BrokerId: "b1", Share: &srtmv1.Share{RateMilli: 7_000_000, Burst: 18}, Window: stats, P99AccessFraction: &ofB1},
			},
			Moves:  []*srtmv1.PublisherMove{{Time: timestamppb.New(time.Unix(1_700_000_000, 0)), Epoch: 3, PublisherId: "north.7", From: "b2", To: "b1", Reason: srtmv1.MoveReason_MOVE_REASON_CONTRACT_CHANGE, Why: "update", By: "certificate ops at 192.0.2.1:7"}},
			Pooled: stats, ExceedFraction: 0.005, SloMet: &met, P99AccessFraction: &ofAll, Fitting: "2 brokers: 0.2 % of 900 messages late in processing",
		},
	}
}

// serve starts an API and returns its address.
func serve(t *testing.T, a srtmv1.AdminServiceServer) string {
	t.Helper()
	s := grpc.NewServer()
	srtmv1.RegisterAdminServiceServer(s, a)
	srtmv1.RegisterGrantServiceServer(s, grants{})
	return testkit.Serve(t, s)
}

func srtm(t *testing.T, address string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	var out, errs bytes.Buffer
	if address != "" {
		args = append(args, "--loaddistributor-address", address)
	}
	err = run(t.Context(), args, strings.NewReader(""), &out, &errs)
	return out.String(), errs.String(), err
}

func TestOutputs(t *testing.T) {
	address := serve(t, &admin{})
	for name, args := range map[string][]string{
		"broker-list":    {"broker", "list"},
		"broker-remove":  {"broker", "remove", "b2"},
		"share-list":     {"share", "list"},
		"share-history":  {"share", "history", "sensors", "--last=2"},
		"share-forget":   {"share", "forget", "b2"},
		"topic-list":     {"topic", "list"},
		"topic-describe": {"topic", "describe", "sensors"},
		"topic-delete":   {"topic", "delete", "sensors"},
		"topic-create":   {"topic", "create", "pumps", "--rate=12.5", "--burst=3"},
	} {
		for _, form := range []string{"json", "table"} {
			t.Run(name+"-"+form, func(t *testing.T) {
				out, _, err := srtm(t, address, append(args, "--output", form)...)
				testkit.Must(t, err)
				testkit.Golden(t, filepath.Join("testdata", name+"."+form), []byte(out))
			})
		}
	}
}

// A topic that was just created has no status yet.
func TestDescribeWithoutFigures(t *testing.T) {
	bare := topic()
	bare.Status = nil
	var out bytes.Buffer
	bare.Learned = &srtmv1.Learned{Count: 3, OthersRate: 0.5, Notes: []string{"do this"}, Publishers: []*srtmv1.LearnedPublisher{
		{Id: "p1", CorrelationKey: "learned-1", Rate: 9.96, PlacedRate: 10, BrokerId: "b1", SendsTo: "b2"},
	}, Groups: []*srtmv1.LearnedGroup{{Key: "learned-1", Count: 2, Members: []*srtmv1.LearnedMember{
		{Id: "p1", Firings: 100, Joint: 98, Expected: 1.5, Width: durationpb.New(time.Millisecond)},
	}}}}
	bare.Spec.Auto = &srtmv1.AutoContract{MaxBurst: 500}
	testkit.Must(t, describe(&out, bare))
	if s := out.String(); !strings.Contains(s, "b2      5000") || strings.Contains(s, "p99  ") {
		t.Errorf("it shows\n%s", s)
	}
	for _, want := range []string{
		"follows   b 1 to 500; it is being measured, and provisional\n",
		"open: 3 publishers learned, the 1 of the highest rates shown; others send 0.5 msg/s\nnote: do this\n",
		"p1         learned-1  10.0   10.0       1970-01-01 00:00:00 UTC  b1      b2        -\n",
		"learned-1  2           98 of 100       1.5        1ms\n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in\n%s", want, out.String())
		}
	}
}

func TestAProfileIsShown(t *testing.T) {
	delays := &srtmv1.AccessDelays{Mean: durationpb.New(time.Millisecond), Quantile: durationpb.New(2 * time.Millisecond), Late: 0.25}
	var out bytes.Buffer
	err := describeProfile(&out, &wanted{ProfileTopicRequest: srtmv1.ProfileTopicRequest{Quantile: 0.99, Confidence: 0.95}, within: time.Millisecond}, &srtmv1.Profile{
		Share: &srtmv1.Share{RateMilli: 1_100_000, Burst: 40}, NeededBurst: 30, Messages: 60_000, Span: durationpb.New(time.Minute), MeanRate: 1000, Missing: 0.02,
		Splits: []*srtmv1.SplitCost{{Brokers: 2, Delays: delays}},
		Wrong:  []*srtmv1.WrongContract{{What: "r -10 %", Share: &srtmv1.Share{RateMilli: 990_000, Burst: 40}, Delays: delays, Unbounded: true}},
	})
	const want = `proposed  r 1100 msg/s, b 40
recorded  60000 messages in 1m0s, 1000.0 msg/s; 2.0 % are missing, of which nothing is known
needed    b 30 for 99.0 % within 1ms; with a confidence of 95.0 % 40

BROKERS  MEAN DELAY  P99  LATE
2        1ms         2ms  25.0 %

IF IT WERE  R    B   MEAN DELAY  P99  LATE
r -10 %     990  40  1ms         2ms  25.0 %, and more the longer it lasts
`
	if err != nil || out.String() != want {
		t.Errorf("%v\n%s", err, out.String())
	}
}

func TestAContractIsSuggestedByATrace(t *testing.T) {
	file := filepath.Join(t.TempDir(), "trace.csv")
	var text strings.Builder
	for i := range 6000 { // ten at once, ten times a second
		fmt.Fprintf(&text, "%.1f,p%d\n", float64(i/10)/10, i%10)
	}
	testkit.Must(t, os.WriteFile(file, []byte(text.String()), 0o600))
	a := &admin{}
	_, _, err := srtm(t, serve(t, a), "topic", "create", "pumps", "--suggest", file)
	testkit.Must(t, err)
	if c := a.created.Spec.Contract; c.RateMilli < 109_000 || c.RateMilli > 111_000 || c.Burst < 10 || c.Burst > 20 {
		t.Errorf("%v", c)
	}
	for _, args := range [][]string{{"--suggest", file, "--rate=1"}, {"--suggest", "command_test.go"}} {
		if _, _, err := srtm(t, serve(t, a), append([]string{"topic", "create", "pumps"}, args...)...); err == nil {
			t.Errorf("%v is taken", args)
		}
	}
}

func TestCreateSendsWhatItWasTold(t *testing.T) {
	a := &admin{}
	_, progress, err := srtm(t, serve(t, a), "topic", "create", "pumps", "--rate=12.5", "--burst=3", "--slo-quantile=0.9",
		"--slo-latency=5ms", "--over-limit=reject", "--policy=maxmin", "--share-rule=proportional", "--group=north:50:0.1:4",
		"--group=:2:1", "--publisher=p1:south:2", "--channel=a", "--channel=b", "--idempotency-key=k")
	testkit.Must(t, err)
	testkit.Equal(t, progress, "placing: 2 brokers\n", "progress")
	want := &srtmv1.CreateTopicRequest{
		IdempotencyKey: "k",
		Spec: &srtmv1.TopicSpec{
			Name: "pumps",
			Contract: &srtmv1.Contract{
				RateMilli: 12_500, Burst: 3,
				Slo:       &srtmv1.Slo{Quantile: 0.9, Latency: durationpb.New(5 * time.Millisecond)},
				OverLimit: srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_REJECT,
			},
			Groups:          []*srtmv1.PublisherGroup{{Key: "north", Count: 50, Rate: 0.1, Batch: 4}, {Count: 2, Rate: 1}},
			Publishers:      []*srtmv1.Publisher{{Id: "p1", CorrelationKey: "south", Rate: 2}},
			PlacementPolicy: "maxmin",
			ShareRule:       "proportional",
			Channels:        []string{"a", "b"},
		},
	}
	if !proto.Equal(a.created, want) {
		t.Errorf("sent %v, want %v", a.created, want)
	}

	// The JSON form of a specification is the output of `describe --output json`.
	file := testkit.File(t, "spec.json", `{"contract":{"rate_milli":"12500","burst":"3"},"channels":["a"]}`)
	b := &admin{}
	_, _, err = srtm(t, serve(t, b), "topic", "create", "pumps", "--file", file)
	testkit.Must(t, err)
	if s := b.created.GetSpec(); s.GetName() != "pumps" || s.GetContract().GetRateMilli() != 12_500 || len(s.GetChannels()) != 1 {
		t.Errorf("sent %v", b.created)
	}
}

func TestRefusalsAreExplained(t *testing.T) {
	with := func(s *status.Status, d protoadapt.MessageV1) error {
		detailed := testkit.Result(s.WithDetails(d)).Must(t)
		return detailed.Err()
	}
	for _, c := range []struct {
		refuse error
		want   string
		code   int
	}{
		{
			with(status.New(codes.InvalidArgument, "2 faults"), &errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{
				{Field: "spec.contract.burst", Description: "0 is less than 1"}, {Field: "spec.name", Description: "is empty"},
			}}),
			"--burst: 0 is less than 1\nthe topic's name: is empty", 1,
		},
		{with(status.New(codes.ResourceExhausted, "no room"), &srtmv1.Infeasible{Bound: "rcap", Need: 9, Have: 5}), "infeasible: 9 msg/s requested, the brokers have 5 left", 3},
		{with(status.New(codes.ResourceExhausted, "no room"), &srtmv1.Infeasible{Bound: "brokers", Need: 1}),
			"infeasible: there are no brokers that could carry it; start nsqd with --loaddistributor-address (srtm broker list shows the brokers)", 3},
		{with(status.New(codes.ResourceExhausted, "no room"), &srtmv1.Infeasible{Bound: "rcap", Need: 9, Have: 5, Fits: &srtmv1.Fits{Rate: 5, MoreBrokers: 2, BrokerMcap: 3}}),
			"infeasible: 9 msg/s requested, the brokers have 5 left; what would fit: r up to 5 msg/s, or 2 more brokers of 3 msg/s", 3},
		{status.Error(codes.AlreadyExists, "topic pumps exists"), "topic pumps exists", 1},
		{status.Error(codes.Unimplemented, "unknown service srtm.v1.GrantService"),
			"the server at ADDRESS does not offer this; is another program there (--loaddistributor-address)? unknown service srtm.v1.GrantService", 1},
		{status.Error(codes.Unavailable, "broker b1 did not answer"), "request failed: broker b1 did not answer", 1},
		{status.Error(codes.Unavailable, `connection error: desc = "transport: Error while dialing: dial tcp 127.0.0.1:4170: connect: connection refused"`),
			"cannot connect to ADDRESS: nothing listens there; start it, or name another address (--loaddistributor-address)", 1},
		{status.Error(codes.Unavailable, "connection error: desc = \"error reading server preface: http2: frame too large, note that the frame header looked like an HTTP/1.1 header\""),
			"cannot connect to ADDRESS: an HTTP server answers there; name the gRPC port, by default 4170 (loaddistributor) or 4192 (admission) (--loaddistributor-address)", 1},
		{status.Error(codes.Unavailable, "connection error: desc = \"error reading server preface: EOF: spoken to in clear, the server ended the connection: it may take TLS\""),
			"cannot connect to ADDRESS: the server ended the connection; it may take TLS (--tls-ca), or be another program (--loaddistributor-address)", 1},
		{status.Error(codes.Unauthenticated, "no token"), "no token; show a token with --token-file, or a certificate with --tls-cert and --tls-key", 1},
	} {
		address := serve(t, &admin{refuse: c.refuse})
		_, _, err := srtm(t, address, "topic", "create", "pumps", "--rate=1", "--burst=1")
		c.want = strings.ReplaceAll(c.want, "ADDRESS", address)
		if err == nil || err.Error() != c.want {
			t.Errorf("%v, want %s", err, c.want)
		}
		var coded program.ExitError
		if code := 1; errors.As(err, &coded) && coded.Code != c.code || !errors.As(err, &coded) && c.code != code {
			t.Errorf("%v: exit code %+v, want %d", err, coded, c.code)
		}
	}
}

// The error of a gRPC call to the port for NSQ clients names the right ports.
func TestNSQPortIsNamed(t *testing.T) {
	address := localtest.NSQD(t, "").TCP
	_, _, err := srtm(t, address, "topic", "list")
	want := "cannot connect to " + address + ": no gRPC server answers there; name the gRPC port, by default 4170 (loaddistributor) or 4192 (admission) (--loaddistributor-address)"
	if err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
}

func TestBadCommandLinesAreUsageErrors(t *testing.T) {
	for _, args := range []string{
		"nonsense", "topic nonsense", "topic create", "topic create a b", "topic describe", "topic delete", "broker list x",
		"broker list --output yaml", "broker list --timeout 0s", "broker list --no-such-flag",
		"topic create t --over-limit drop", "topic create t --group a", "topic create t --group a:b:1",
		"topic create t --group a:1:b", "topic create t --group a:1:1:b", "topic create t --publisher a", "topic create t --publisher a:b:c",
		"topic create t --file x --rate 1", "topic create t --rate fast", "up here", "plan here",
	} {
		_, _, err := srtm(t, "", strings.Fields(args)...)
		var usage program.UsageError
		if !errors.As(err, &usage) {
			t.Errorf("srtm %s: %v, want a usage error", args, err)
		}
	}
	_, _, err := srtm(t, "", "topic", "create", "--file", "/does/not/exist")
	testkit.ErrorHas(t, err, "/does/not/exist", "a missing file")
	if _, _, err := srtm(t, "127.0.0.1:1", "topic", "list", "--timeout", "2s"); err == nil {
		t.Error("nothing listens there")
	}
}

func TestTheEnvironmentNamesTheLoadDistributor(t *testing.T) {
	a := &admin{}
	t.Setenv(addressEnv, serve(t, a))
	if _, _, err := srtm(t, "", "topic", "delete", "valves"); err != nil || a.deleted != "valves" {
		t.Errorf("%v, deleted %q", err, a.deleted)
	}
}

// srtm up does not return the exit code of its processes: 2 would mean that the command line is wrong.
func TestUpFailsWithItsOwnExitCode(t *testing.T) {
	bin := t.TempDir()
	for _, name := range []string{"tbadaptor", "loaddistributor", "nsqd"} {
		testkit.Must(t, os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\nexit 2\n"), 0o755))
	}
	_, _, err := srtm(t, "", "up", "--bin-dir", bin, "--data-dir", t.TempDir())
	var child *exec.ExitError
	if !errors.As(err, &child) || child.ExitCode() != 2 {
		t.Errorf("%v, want a process that ended with 2", err)
	}
	var coded program.ExitError
	if errors.As(err, &coded) {
		t.Errorf("exit code %d: %v", coded.Code, err)
	}
}

func TestPlanAsksForItsExitCode(t *testing.T) {
	text := `{"brokers":[{"id":"b1","mcap":10,"allocated":0}],"topic":{"name":"t","rate":100,"burst":10}}`
	file := testkit.File(t, "scenario.json", text)
	_, _, err := srtm(t, "", "plan", "--file", file)
	var coded program.ExitError
	if !errors.As(err, &coded) || coded.Code != 3 {
		t.Errorf("%v: want exit code 3", err)
	}
}

func TestChangesAreSent(t *testing.T) {
	a := &admin{}
	address := serve(t, a)
	_, _, err := srtm(t, address, "topic", "update", "sensors", "--rate", "5", "--burst", "7", "--group", "g:2:1")
	testkit.Must(t, err)
	if s := a.updated.GetSpec(); s.GetName() != "sensors" || s.GetContract().GetRateMilli() != 5000 || len(s.GetGroups()) != 1 {
		t.Errorf("updated %v", a.updated)
	}
	_, _, err = srtm(t, address, "topic", "move", "sensors", "--to", "b2", "--publisher-id", "g.0", "--publisher-id", "g.1")
	testkit.Must(t, err)
	if a.moved.GetBrokerId() != "b2" || len(a.moved.GetPublisherIds()) != 2 {
		t.Errorf("moved %v", a.moved)
	}
	if out, _, err := srtm(t, address, "broker", "drain", "b1", "--wait"); err != nil || a.drained.GetBrokerId() != "b1" || !strings.Contains(out, "topics on it: 0") {
		t.Errorf("drained %v: %v\n%s", a.drained, err, out)
	}
	a.brokers = []*srtmv1.Broker{{Id: "b1", Draining: true, SafeToStop: true}}
	out, log, err := srtm(t, address, "broker", "drain", "b1", "--force", "--wait")
	if err != nil || !a.drained.GetForce() || out != "broker b1: draining true, topics on it: 0\nsafe to stop b1\n" ||
		log != "  waits for sensors: consumers\n    what helps: connect some\n" {
		t.Errorf("drained %v: %v\n%s%s", a.drained, err, out, log)
	}
	a.brokers = []*srtmv1.Broker{{Id: "b1", Draining: true, Topics: []string{"sensors"}, Waits: []*srtmv1.DrainWait{{Topic: "sensors", Reason: "more"}}}}
	_, _, err = srtm(t, address, "broker", "drain", "b1", "--wait", "--timeout=1s")
	if err == nil || err.Error() != "topics still on broker b1: sensors\n  waits for sensors: more" {
		t.Errorf("a drain that does not end: %v", err)
	}
	if out, _, err := srtm(t, address, "broker", "drain", "b1", "--undo"); err != nil || !a.drained.GetUndo() || !strings.Contains(out, "draining false") {
		t.Errorf("undone %v: %v\n%s", a.drained, err, out)
	}
	if out, _, err := srtm(t, address, "broker", "capacity", "b1", "--mcap=5000"); err != nil || a.set.GetBrokerId() != "b1" || a.set.GetMcap() != 5000 ||
		out != "broker b1: mcap 5000 msg/s, configured 20000\n" {
		t.Errorf("set %v: %v\n%s", a.set, err, out)
	}
	if out, _, err := srtm(t, address, "broker", "capacity", "b1", "--unset", "--output=json"); err != nil || a.set.GetMcap() != 0 || !strings.Contains(out, `"calibrated_mcap": "0"`) {
		t.Errorf("unset %v: %v\n%s", a.set, err, out)
	}
	for _, args := range [][]string{
		{"topic", "move", "sensors"}, {"topic", "update"}, {"broker", "drain"}, {"broker", "drain", "b1", "--undo", "--wait"}, {"broker", "drain", "b1", "--undo", "--force"},
		{"broker", "capacity"}, {"broker", "capacity", "b1"}, {"broker", "capacity", "b1", "--unset", "--mcap=5"},
		{"broker", "capacity", "b1", "--mcap=-5"}, {"broker", "capacity", "b1", "--mcap=1000000001"},
	} {
		if _, _, err := srtm(t, address, args...); !errors.As(err, new(program.UsageError)) {
			t.Errorf("%v: %v", args, err)
		}
	}
}

// A command goes to the leader, and tries another address if there is no leader yet.
func TestACommandFindsTheLeader(t *testing.T) {
	leader := &admin{}
	to := serve(t, leader)
	refusal := func(metadata map[string]string) error {
		s, err := status.New(codes.Unavailable, "it does not lead").WithDetails(&errdetails.ErrorInfo{Reason: "NOT_LEADER", Metadata: metadata})
		testkit.Must(t, err)
		return s.Err()
	}
	follower := &admin{refuse: refusal(map[string]string{"leader": to})}
	if _, _, err := srtm(t, serve(t, follower), "topic", "create", "sensors", "--rate", "5", "--burst", "7"); err != nil || leader.created == nil {
		t.Errorf("%v, the leader got %v", err, leader.created)
	}
	lost := &admin{refuse: refusal(nil)}
	if _, _, err := srtm(t, serve(t, lost), "topic", "create", "sensors", "--rate", "5", "--burst", "7", "--timeout", "1s"); err == nil {
		t.Error("created without a leader")
	}
}
