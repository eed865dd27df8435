package why

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/testkit"
)

func of(d time.Duration) *srtmv1.Histogram {
	l := histogram.NewLatency()
	l.RecordMany(d, 1000)
	return obs.LatencyProto(l)
}

func topic(met *bool, fraction float64, access, broker, consumer time.Duration) *srtmv1.Topic {
	stats := &srtmv1.TopicStats{
		Interval: durationpb.New(10 * time.Second), Offered: 1000, Delivered: 1000, BurstNeeded: 30,
		Access: of(access), Processing: of(broker), Consumer: of(consumer), Delivery: of(access + broker),
	}
	return &srtmv1.Topic{
		Spec: &srtmv1.TopicSpec{Name: "t", Contract: &srtmv1.Contract{RateMilli: 220_000, Burst: 40, Slo: &srtmv1.Slo{Quantile: 0.99, Latency: durationpb.New(20 * time.Millisecond)}}},
		Status: &srtmv1.TopicStatus{
			Pooled: stats, SloMet: met, ExceedFraction: 0.05, P99AccessFraction: &fraction,
			Brokers: []*srtmv1.BrokerTopicStatus{
				{BrokerId: "b1", Share: &srtmv1.Share{RateMilli: 110_000, Burst: 20}, Window: stats, Last: stats},
				{BrokerId: "b2", Share: &srtmv1.Share{RateMilli: 110_000, Burst: 20}, Window: stats, Last: stats},
			},
		},
	}
}

func TestWhoseFaultItIs(t *testing.T) {
	yes, no := true, false
	const fast, slow = time.Millisecond, time.Second
	idle := topic(&yes, 0, 0, 0, 0)
	idle.Status.Pooled = &srtmv1.TopicStats{Depth: 7}
	for name, test := range map[string]struct {
		topic *srtmv1.Topic
		want  Verdict
		says  string
	}{
		"tokens":           {topic(&no, 0.99, slow, fast, fast), Verdict{SLO: Missed, Culprit: "tokens"}, "need a burst of 30. The broker's share has a burst of 20: the contract's burst of 40 is split over 2 brokers."},
		"the broker":       {topic(&no, 0.01, fast, slow, fast), Verdict{SLO: Missed, Culprit: "broker"}, "overloaded or stalled"},
		"both":             {topic(&no, 0.5, slow, slow, fast), Verdict{SLO: Missed, Culprit: "tokens and broker"}, "There are two causes"},
		"met":              {topic(&yes, 0.2, fast, fast, fast), Verdict{SLO: Met}, "the wait for tokens is 20 % and the work of the broker 80 %"},
		"slow consumers":   {topic(&yes, 0.2, fast, fast, slow), Verdict{SLO: Met}, "Consumers keep messages waiting"},
		"not judged":       {topic(nil, 0.2, fast, fast, fast), Verdict{SLO: Undecided}, "too few messages were delivered, or the topic sends more than its contract"},
		"nothing moves":    {idle, Verdict{SLO: Undecided}, "Waiting in channels for consumers: 7 messages."},
		"nothing is known": {&srtmv1.Topic{}, Verdict{SLO: Undecided}, "nothing to judge"},
	} {
		got := Judge(test.topic)
		if got.SLO != test.want.SLO || got.Culprit != test.want.Culprit || !strings.Contains(got.Text, test.says) {
			t.Errorf("%s: %+v, want %+v and %q", name, got, test.want, test.says)
		}
	}
}

func TestWhatSplittingCosts(t *testing.T) {
	one := topic(nil, 0, 3*time.Millisecond, 0, 0)
	one.Spec.Contract.Burst = 2
	for _, b := range one.Status.Brokers {
		b.Share.Burst = 1
	}
	p, ok := PenaltyOf(one)
	// Each half has half the arrivals and half the tokens: at least twice the delay.
	if !ok || p.Factor < 2 || p.Split < 2*p.Whole || p.Measured < 2900*time.Microsecond || p.Measured > 3100*time.Microsecond {
		t.Errorf("%+v, %v", p, ok)
	}
	one.Status.Brokers[0].Window.Offered = 1_000_000
	if p, ok := PenaltyOf(one); !ok || p.Split != Forever || p.Factor != 0 {
		t.Errorf("beyond the contract: %+v, %v", p, ok)
	}
	one.Status.Brokers[0].Share = nil
	if p, ok := PenaltyOf(one); ok {
		t.Errorf("without a share: %+v", p)
	}
	if p, ok := PenaltyOf(&srtmv1.Topic{}); ok {
		t.Errorf("without anything: %+v", p)
	}
}

func TestDurations(t *testing.T) {
	for d, want := range map[time.Duration]string{Forever: "without bound", 1500 * time.Millisecond: "1.5 s", 18300 * time.Microsecond: "18.3 ms", 999: "999 ns", 0: "0 ms", 2500: "2.5 µs"} {
		testkit.Equal(t, Duration(d), want, "%d", d)
	}
}
