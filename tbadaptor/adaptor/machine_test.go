package adaptor

import (
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

func TestWorth(t *testing.T) {
	s := func(rate tokenbucket.Rate, burst int64) tokenbucket.Share {
		return tokenbucket.Share{Rate: rate, Burst: burst}
	}
	view := ledger.TopicView{Members: []ledger.MemberView{
		{Broker: "b1", Target: s(1000, 100)}, {Broker: "b2", Target: s(1000, 100)},
		{Broker: "b3"}, // on its way to nothing
	}}
	for _, test := range []struct {
		name   string
		target []share.Assigned
		want   bool
	}{
		{"the same", []share.Assigned{{Broker: "b1", Share: s(1000, 100)}, {Broker: "b2", Share: s(1000, 100)}}, false},
		{"within the band", []share.Assigned{{Broker: "b1", Share: s(1050, 95)}, {Broker: "b2", Share: s(950, 105)}}, false},
		{"a rate outside", []share.Assigned{{Broker: "b1", Share: s(1051, 100)}, {Broker: "b2", Share: s(949, 100)}}, true},
		{"a burst outside", []share.Assigned{{Broker: "b1", Share: s(1000, 106)}, {Broker: "b2", Share: s(1000, 94)}}, true},
		{"somebody new", []share.Assigned{{Broker: "b1", Share: s(1000, 100)}, {Broker: "b2", Share: s(999, 99)}, {Broker: "b4", Share: s(1, 1)}}, true},
		{"somebody left out", []share.Assigned{{Broker: "b1", Share: s(1000, 100)}}, true},
	} {
		if got := worth(view, test.target); got != test.want {
			t.Errorf("%s: %v", test.name, got)
		}
	}
}

func TestProposeForMembersThatAreAway(t *testing.T) {
	s := func(rate tokenbucket.Rate, burst int64) tokenbucket.Share {
		return tokenbucket.Share{Rate: rate, Burst: burst}
	}
	view := func(reserved tokenbucket.Share) ledger.TopicView {
		return ledger.TopicView{Members: []ledger.MemberView{
			{Broker: "b1", Target: s(500, 5), Reserved: s(500, 5)}, {Broker: "b2", Target: s(500, 5), Reserved: reserved},
		}}
	}
	propose := func(view ledger.TopicView, connected ...string) ([]share.Assigned, error) {
		m := New(0, Config{Window: time.Second})
		c := &Contract{Topic: "t", Rule: share.Proportional, Total: s(1000, 10), Placed: []share.Placed{{Broker: "b1", Publishers: 1}, {Broker: "b2", Publishers: 1}}}
		m.place(0, c)
		for _, broker := range []string{"b1", "b2"} {
			c.tuner.Report(broker, share.Step{At: mono.Time(time.Second), Length: time.Second})
		}
		for _, id := range connected {
			if _, err := m.Hello(0, ledger.Session{Broker: id, Instance: "1"}); err != nil {
				t.Fatal(err)
			}
		}
		return m.propose(mono.Time(time.Second), c, view)
	}
	for _, test := range []struct {
		name      string
		reserved  tokenbucket.Share
		connected []string
		want      map[string]tokenbucket.Share // nil: no proposal
	}{
		{"one is away and holds its share", s(500, 5), []string{"b1"}, map[string]tokenbucket.Share{"b1": s(500, 5), "b2": s(500, 5)}},
		{"one is away and holds nothing", s(0, 0), []string{"b1"}, map[string]tokenbucket.Share{"b1": s(1000, 10), "b2": {}}},
		{"one is away and holds all", s(1000, 10), []string{"b1"}, nil},
		{"all are away", s(500, 5), []string{}, nil},
	} {
		got, err := propose(view(test.reserved), test.connected...)
		if err != nil {
			t.Errorf("%s: %v", test.name, err)
			continue
		}
		if (got == nil) != (test.want == nil) || len(got) != len(test.want) {
			t.Errorf("%s: %+v, want %+v", test.name, got, test.want)
		}
		for _, a := range got {
			if a.Share != test.want[a.Broker] {
				t.Errorf("%s: %s gets %+v, want %+v", test.name, a.Broker, a.Share, test.want[a.Broker])
			}
		}
	}
	// A member that restarted and was forgotten by the ledger gets a share again.
	forgotten := view(s(0, 0))
	forgotten.Members = forgotten.Members[:1]
	got, err := propose(forgotten, "b1", "b2")
	if err != nil || len(got) != 2 || got[1].Share.IsZero() {
		t.Errorf("a member the ledger does not list: %+v, %v", got, err)
	}
}
