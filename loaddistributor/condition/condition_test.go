package condition

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/reports"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
)

// active returns a topic of 100 msg/s and a burst of 10 from 10 publishers, on broker b.
func active(t *testing.T) catalog.Topic {
	t.Helper()
	cat := catalog.New()
	apply := func(e catalog.Event) {
		t.Helper()
		_, err := cat.Apply(e)
		testkit.Must(t, err)
	}
	apply(catalog.BrokerJoined{ID: "b", Instance: "one", Mcap: 100})
	spec := &catalog.Spec{
		Demand: placement.Demand{Topic: "t", Rate: 100, RateMilli: 100_000, Burst: 10, Groups: []placement.Group{{Key: "g", Count: 10, Rate: 10}}},
		SLO:    catalog.SLO{Quantile: 0.99, Latency: 5 * time.Millisecond}, Policy: placement.SRTM, ShareRule: "static",
	}
	plan, err := placement.Place(spec.Policy, cat.Snapshot(""), spec.Demand, nil)
	testkit.Must(t, err)
	placed, err := catalog.NewTopicPlaced(spec, plan, "")
	testkit.Must(t, err)
	apply(placed)
	apply(catalog.MemberPrepared{Topic: "t", Broker: "b"})
	apply(catalog.TopicActivated{Topic: "t"})
	topic, _ := cat.Topic("t")
	return topic
}

func TestWhatIsFound(t *testing.T) {
	topic, now := active(t), time.Now()
	for _, test := range []struct {
		name     string
		stats    *srtmv1.TopicStats // reported every second; nil: nothing
		gone     bool
		decision tuner.Decision
		shown    catalog.State
	}{
		{name: "nothing comes", stats: &srtmv1.TopicStats{}, shown: catalog.Active},
		{name: "all is in time", stats: &srtmv1.TopicStats{Offered: 100, Delivered: 100}, decision: tuner.Within, shown: catalog.Active},
		{name: "a tenth is late", stats: &srtmv1.TopicStats{Offered: 100, Delivered: 100, Exceeded: 10}, decision: tuner.Beyond, shown: catalog.Degraded},
		{name: "all is late, and too much", stats: &srtmv1.TopicStats{Offered: 200, Delivered: 100, Exceeded: 100}, shown: catalog.Degraded},
		{name: "the broker is gone", gone: true, decision: tuner.Beyond, shown: catalog.Degraded},
	} {
		t.Run(test.name, func(t *testing.T) {
			d, broker, now := New(), reports.NewBroker(time.Second, 10*time.Second), now
			evidence := Evidence{
				Reported:     func(string) *reports.Topic { return broker.Topic("t") },
				Disconnected: func(string) bool { return test.gone },
				Window:       10 * time.Second,
			}
			var changes []catalog.StateChanged
			for range 30 {
				now = now.Add(time.Second)
				if test.stats != nil {
					test.stats.Topic, test.stats.Interval = "t", durationpb.New(time.Second)
					_, err := broker.Apply(&srtmv1.BrokerReport{Topics: []*srtmv1.TopicStats{test.stats}}, now, func(string) bool { return true })
					testkit.Must(t, err)
				}
				changes = append(changes, d.Judge(topic, evidence, now)...)
			}
			if got := d.Verdict(topic, evidence, now).Decision; got != test.decision {
				t.Errorf("the verdict is %v, want %v", got, test.decision)
			}
			if got := d.ApplyTo(topic); got.State != test.shown {
				t.Errorf("it is shown as %v (%s), want %v", got.State, got.Reason, test.shown)
			}
			if changed := len(changes) > 0; changed != (test.shown == catalog.Degraded) {
				t.Errorf("changes are %+v", changes)
			}
		})
	}
}

// A report counts even if its timestamp is at or before the last look, provided that it was taken
// after the look. Otherwise a topic that stopped offering messages would never make up for its excess.
func TestReportsThatComeJustAfterALook(t *testing.T) {
	topic, now := active(t), time.Now()
	d, broker := New(), reports.NewBroker(time.Second, 10*time.Second)
	evidence := Evidence{
		Reported:     func(string) *reports.Topic { return broker.Topic("t") },
		Disconnected: func(string) bool { return false },
		Window:       10 * time.Second,
	}
	for _, c := range []struct {
		offered uint64 // msg/s
		over    bool
	}{{150, true}, {0, false}} {
		for range 30 {
			now = now.Add(time.Second)
			d.Judge(topic, evidence, now)
			_, err := broker.Apply(&srtmv1.BrokerReport{Topics: []*srtmv1.TopicStats{{
				Topic: "t", Interval: durationpb.New(time.Second), Offered: c.offered, Delivered: 100,
			}}}, now, func(string) bool { return true })
			testkit.Must(t, err)
		}
		testkit.Equal(t, d.IsOver(), c.over, "over its contract, at %d msg/s", c.offered)
	}
}

func TestNumbersForPeople(t *testing.T) {
	for x, want := range map[float64]string{0: "0", 999: "999", 1475: "1,475", 1_234_567.8: "1,234,568"} {
		if got := thousands(x); got != want {
			t.Errorf("%v is %q, want %q", x, got, want)
		}
	}
}
