package calibrate

import (
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tools/iotpub/load"
	"github.com/srtm-io/srtm/tools/iotpub/report"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/iotpub/verify"
)

func TestALoadIsCarriedOrNot(t *testing.T) {
	good := func() *report.Report {
		late := report.Quantiles{Count: 1000, P99Us: 1000}
		return &report.Report{
			Publishers: 10, OfferedRate: 100, AchievedRate: 98, Lateness: late,
			Counts:  report.Counts{Offered: 100, Accepted: 98},
			Account: &verify.Result{Accepted: 98, Delivered: 98},
		}
	}
	for name, c := range map[string]struct {
		change     func(*report.Report)
		why, fault string
	}{
		"good":      {func(*report.Report) {}, "", ""},
		"too slow":  {func(r *report.Report) { r.AchievedRate = 96.9 }, "only 96.9 % of the offered rate was achieved", ""},
		"skipped":   {func(r *report.Report) { r.Skipped = 2 }, "2 messages not accepted", ""},
		"refused":   {func(r *report.Report) { r.Refused = map[string]uint64{"E": 1} }, "1 message not accepted", ""},
		"late":      {func(r *report.Report) { r.Lateness.P99Us = 1e6 }, "", ""},
		"lost":      {func(r *report.Report) { r.Account.Lost = 1 }, "", "lost 1 accepted message"},
		"very slow": {func(r *report.Report) { r.AchievedRate = 0 }, "only 0.0 %", ""},
	} {
		r := good()
		c.change(r)
		a := Attempted(r)
		if a.Carried != (c.why == "") || !strings.HasPrefix(a.Why, c.why) || a.Fault != c.fault {
			t.Errorf("%s: %+v, want %q, %q", name, a, c.why, c.fault)
		}
		if f := a.fraction(); !(f >= 0.2 && f <= 0.7) {
			t.Errorf("%s: the next fraction is %v", name, f)
		}
		if c.why != "" && !strings.Contains(a.Text(), "not carried: "+c.why) {
			t.Errorf("%s: %s", name, a.Text())
		}
	}
}

func TestShortenTakesFewerPublishers(t *testing.T) {
	o := load.Default()
	l := testkit.Result(o.Build()).Must(t)
	if got := shorten(o, l, 0.35); got.Spec.Publishers != 350 || got.Keep != 0 {
		t.Errorf("%+v", got)
	}
	one := o
	one.Spec.Publishers = 1
	if got := shorten(one, l, 0.2); got.Spec.Publishers != 1 {
		t.Errorf("%+v", got)
	}
	// A recording counts the publishers' rates, not their number.
	o.Trace = "some"
	l.Sources = []schedule.Source{{Rate: 10}, {Rate: 1}, {Rate: 1}, {Rate: 8}}
	for fraction, keep := range map[float64]int{0.7: 3, 0.5: 1, 0.1: 1} {
		if got := shorten(o, l, fraction); got.Keep != keep {
			t.Errorf("%v: keeps %d publishers, want %d", fraction, got.Keep, keep)
		}
	}
}
