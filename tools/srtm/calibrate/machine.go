package calibrate

import (
	"fmt"

	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/tools/iotpub/load"
	"github.com/srtm-io/srtm/tools/iotpub/report"
)

// CarriedFraction is the part of the offered rate that must be achieved for a load to count as
// carried.
const CarriedFraction = 0.97

// Attempt is a load that was tried on this machine.
type Attempt struct {
	Publishers   int              `json:"publishers"`
	OfferedRate  float64          `json:"offered_per_s"`
	AchievedRate float64          `json:"achieved_per_s"`
	NotAccepted  uint64           `json:"not_accepted"`
	Lateness     report.Quantiles `json:"lateness"`
	EndToEnd     report.Quantiles `json:"end_to_end"`
	Carried      bool             `json:"carried"`
	Why          string           `json:"why,omitempty"`   // why the load was not carried
	Fault        string           `json:"fault,omitempty"` // messages that were lost or came twice
}

// Attempted judges from the generator's report whether a load was carried. Late sending
// does not count: the load is seldom the cause, and the report shows the lateness.
func Attempted(rep *report.Report) Attempt {
	a := Attempt{
		Publishers: rep.Publishers, OfferedRate: rep.OfferedRate, AchievedRate: rep.AchievedRate,
		NotAccepted: rep.Skipped + rep.Unanswered + rep.RefusedTotal(), Lateness: rep.Lateness, Fault: rep.Fault(),
	}
	if rep.EndToEnd != nil {
		a.EndToEnd = *rep.EndToEnd
	}
	switch {
	case rep.AchievedFraction() < CarriedFraction:
		a.Why = fmt.Sprintf("only %.1f %% of the offered rate was achieved", 100*rep.AchievedFraction())
	case a.NotAccepted > 0:
		a.Why = plural.Count(int(a.NotAccepted), "message") + " not accepted"
	default:
		a.Carried = true
	}
	return a
}

// Text is a line about the attempt for people.
func (a *Attempt) Text() string {
	verdict := "carried"
	if !a.Carried {
		verdict = "not carried: " + a.Why
	}
	return fmt.Sprintf("%s, offered %.0f/s, achieved %.0f/s (%.1f %%), sent late p99 %s, end to end p99 %s: %s",
		plural.Count(a.Publishers, "publisher"), a.OfferedRate, a.AchievedRate, 100*a.AchievedRate/max(a.OfferedRate, 1e-9),
		report.Micros(a.Lateness.P99Us), report.Micros(a.EndToEnd.P99Us), verdict)
}

// Smaller returns the load to try after an attempt that was not carried: o with fewer publishers.
// l is the load that o described.
func (a *Attempt) Smaller(o load.Options, l *load.Load) load.Options {
	return shorten(o, l, a.fraction())
}

// fraction is the part of the load to try next.
func (a *Attempt) fraction() float64 {
	if a.OfferedRate == 0 {
		return 0.5
	}
	return min(0.7, max(0.2, 0.8*a.AchievedRate/a.OfferedRate))
}

// shorten takes a load down to about a fraction of its rate: fewer publishers.
func shorten(o load.Options, l *load.Load, fraction float64) load.Options {
	if o.Trace == "" {
		o.Spec.Publishers = max(1, int(float64(o.Spec.Publishers)*fraction))
		return o
	}
	target, sum := l.Rate()*fraction, 0.0
	for i, s := range l.Sources {
		if sum += s.Rate; sum > target {
			o.Keep = max(1, i)
			return o
		}
	}
	return o
}
