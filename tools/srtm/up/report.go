package up

import (
	"cmp"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
	"github.com/srtm-io/srtm/tokenbucket"
	"github.com/srtm-io/srtm/tools/iotpub/report"
	"github.com/srtm-io/srtm/tools/srtm/calibrate"
)

// Report is the result of `srtm up`.
type Report struct {
	Version  string `json:"version"`
	CPUs     int    `json:"cpus"`
	Platform string `json:"platform"`
	Brokers  int    `json:"brokers"`
	Mcap     int64  `json:"mcap"`
	Seed     uint64 `json:"seed"`
	Load     string `json:"load"`

	Calibration []calibrate.Attempt `json:"calibration"`
	// Reduced means that the load is smaller than requested.
	Reduced bool `json:"reduced"`

	RateMilli     int64   `json:"rate_milli"`
	Burst         int64   `json:"burst"`
	ProfiledBurst int64   `json:"profiled_burst,omitempty"` // burst that the load needs on one broker
	Quantile      float64 `json:"slo_quantile"`
	SLOUs         int64   `json:"slo_us"`
	SLODerived    bool    `json:"slo_derived,omitempty"`
	// MachineUs is the end-to-end latency at the SLO's quantile without waits for tokens,
	// from the calibration. SplitUs is the wait for tokens with an even split over
	// SplitOver brokers.
	MachineUs int64 `json:"machine_us,omitempty"`
	SplitOver int   `json:"split_over,omitempty"`
	SplitUs   int64 `json:"split_us,omitempty"`
	// MaxLatenessUs is the limit for the p99 of late sending. Above it the machine
	// influences the results as much as the placement.
	MaxLatenessUs int64 `json:"max_lateness_us"`

	Phases      []Phase `json:"phases"`
	Interrupted bool    `json:"interrupted,omitempty"`
	// Failure is the error that ended the run early, or an error at its end.
	Failure string `json:"failure,omitempty"`
}

// Placed is one broker of a placement.
type Placed struct {
	Broker     string `json:"broker"`
	Publishers uint32 `json:"publishers"`
	RateMilli  int64  `json:"rate_milli"`
	Burst      int64  `json:"burst"`
}

// Phase is the result of one placement.
type Phase struct {
	Name      string   `json:"name"`
	Policy    string   `json:"policy"`
	Topic     string   `json:"topic"`
	Placement []Placed `json:"placement"`
	// Emulator holds the measurements of the sensors and the subscriber.
	Emulator report.Report `json:"emulator"`
	// Broker holds the brokers' measurements in the last window of sending; nil if no
	// broker reported.
	Broker *BrokerSide `json:"broker,omitempty"`
	// OnTime is the computed effect of tokens alone, if every message were sent on time;
	// nil in a calibration.
	OnTime *OnTime `json:"on_time,omitempty"`
	// Pressure is the fraction of time in which some process of the machine waited for a
	// processor; nil if the kernel does not report it.
	Pressure *float64 `json:"cpu_pressure,omitempty"`
}

// OnTime is computed from the schedule and the shares.
type OnTime struct {
	Access report.Quantiles `json:"access"`
	// Late is the number of messages that wait for longer than the SLO.
	Late int64 `json:"late"`
}

// BrokerSide holds the stats of all brokers, merged.
type BrokerSide struct {
	WindowSeconds  float64          `json:"window_s"`
	Delivered      uint64           `json:"delivered"`
	Access         report.Quantiles `json:"access"`
	Processing     report.Quantiles `json:"processing"`
	Delivery       report.Quantiles `json:"delivery"`
	ExceedFraction float64          `json:"exceed_fraction"`
	SLOMet         *bool            `json:"slo_met,omitempty"` // nil: undecided
}

func (p *Phase) observe(s *srtmv1.TopicStatus) {
	pooled := s.GetPooled()
	if pooled.GetDelivered() == 0 {
		return
	}
	p.Broker = &BrokerSide{
		WindowSeconds: pooled.GetInterval().AsDuration().Seconds(), Delivered: pooled.GetDelivered(),
		Access: quantiles(pooled.GetAccess()), Processing: quantiles(pooled.GetProcessing()), Delivery: quantiles(pooled.GetDelivery()),
		ExceedFraction: s.GetExceedFraction(), SLOMet: s.SloMet,
	}
}

// quantiles converts a histogram. An invalid histogram counts as empty.
func quantiles(h *srtmv1.Histogram) report.Quantiles {
	l, err := obs.LatencyFromProto(h)
	if err != nil {
		return report.Quantiles{}
	}
	return report.QuantilesOf(l)
}

// Faults lists reasons for failure: lost or duplicated messages. A load that was not
// carried and a missed SLO are notes, not faults.
func (r *Report) Faults() []string {
	var faults []string
	for i := range r.Calibration {
		if f := r.Calibration[i].Fault; f != "" {
			faults = append(faults, "calibration: "+f)
		}
	}
	for i := range r.Phases {
		p := &r.Phases[i]
		if f := p.Emulator.Fault(); f != "" {
			faults = append(faults, p.Name+": "+f)
		}
		if p.Emulator.Account == nil {
			faults = append(faults, p.Name+": the delivered messages were not checked")
		}
	}
	if len(r.Phases) == 0 && !r.Interrupted {
		faults = append(faults, "nothing was measured")
	}
	return faults
}

// notes lists what a reader must know about a phase's results.
func (r *Report) notes(p *Phase) (notes []string) {
	e, b := &p.Emulator, p.Broker
	if f := e.AchievedFraction(); !e.Interrupted && f < calibrate.CarriedFraction {
		notes = append(notes, fmt.Sprintf("this machine did not carry the load: %.1f msg/s of %.1f offered were achieved (%.1f %%)",
			e.AchievedRate, e.OfferedRate, 100*f))
	}
	lateness := fmt.Sprintf("at p99, messages were sent %s late", report.Micros(e.Lateness.P99Us))
	if b != nil {
		lateness += fmt.Sprintf(" and took %s to process", report.Micros(b.Processing.P99Us))
	}
	if p.Pressure != nil {
		lateness += fmt.Sprintf("; something waited for a processor %.0f %% of the time", 100**p.Pressure)
	}
	switch {
	case b != nil && b.SLOMet != nil && !*b.SLOMet && p.OnTime != nil && float64(p.OnTime.Late) <= (1-r.Quantile)*float64(b.Delivered):
		late := "none"
		if p.OnTime.Late > 0 {
			late = strconv.FormatInt(p.OnTime.Late, 10)
		}
		notes = append(notes, fmt.Sprintf("this machine missed the SLO, not the tokens: sent on time, %s of the messages would wait longer than %v for one.\nHere, %s",
			late, r.slo(), lateness))
	case r.MaxLatenessUs > 0 && e.Lateness.P99Us > r.MaxLatenessUs:
		notes = append(notes, "these results are as much this machine's: "+lateness)
	}
	return notes
}

func (r *Report) slo() time.Duration { return time.Duration(r.SLOUs) * time.Microsecond }

func (r *Report) contractText() string {
	burst := "as requested"
	if r.ProfiledBurst > 0 {
		burst = fmt.Sprintf("the load needs %d on one broker", r.ProfiledBurst)
		if r.SplitOver > 1 {
			burst += fmt.Sprintf(", and about as many on each of %d", r.SplitOver)
		}
	}
	slo := "as requested"
	if r.SLODerived {
		slo = "not calibrated"
		if r.MachineUs > 0 {
			slo = fmt.Sprintf("calibrating, %.6g %% took up to %s end to end", 100*r.Quantile, report.Micros(r.MachineUs))
		}
		if r.SplitUs > 0 {
			slo += fmt.Sprintf("; an even split waits %s for tokens", report.Micros(r.SplitUs))
		}
	}
	return fmt.Sprintf("r %s msg/s (%g x offered), b %s (%s)\n%13sSLO %.6g %% within %v (%s)",
		rateText(r.RateMilli), rateMargin, plural.Count(r.Burst, "message"), burst, "", 100*r.Quantile, r.slo(), slo)
}

func rateText(milli int64) string { return tokenbucket.Rate(milli).Text() }

// WriteText prints the report for people.
func (r *Report) WriteText(w io.Writer) error {
	var b strings.Builder
	line := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "%-12s "+format+"\n", append([]any{name}, args...)...)
	}
	b.WriteString("\n")
	line("report", "%s, %s, %s", r.Version, plural.Count(r.CPUs, "CPU"), r.Platform)
	if r.Load != "" {
		line("load", "%s, seed %d", r.Load, r.Seed)
	}
	for i := range r.Calibration {
		line("calibration", "%s", r.Calibration[i].Text())
	}
	if r.Reduced {
		line("", "THE LOAD IS SMALLER THAN REQUESTED: this machine does not carry more")
	}
	line("cluster", "%s of %d msg/s", plural.Count(r.Brokers, "broker"), r.Mcap)
	if r.Burst > 0 {
		line("contract", "%s", r.contractText())
	}
	if r.Interrupted {
		line("", "INTERRUPTED: what follows is what there was")
	}
	if r.Failure != "" {
		line("", "IT FAILED; what follows is what there was")
	}
	if len(r.Phases) > 0 {
		b.WriteString("\n")
		if err := r.compare(&b); err != nil {
			return err
		}
		b.WriteString("\n")
	}
	b.WriteString(r.verdict())
	_, err := io.WriteString(w, b.String())
	return err
}

func (r *Report) compare(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	row := func(name string, cell func(*Phase) string) {
		fmt.Fprint(t, name)
		for i := range r.Phases {
			fmt.Fprint(t, "\t"+cell(&r.Phases[i]))
		}
		fmt.Fprintln(t)
	}
	us := func(of func(*Phase) report.Quantiles, q func(report.Quantiles) int64) func(*Phase) string {
		return func(p *Phase) string {
			v := of(p)
			if v.Count == 0 {
				return "-"
			}
			return report.Micros(q(v))
		}
	}
	broker := func(p *Phase) *BrokerSide { return cmp.Or(p.Broker, &BrokerSide{}) }
	endToEnd := func(p *Phase) report.Quantiles { return *cmp.Or(p.Emulator.EndToEnd, &report.Quantiles{}) }
	p99 := func(q report.Quantiles) int64 { return q.P99Us }

	row("", func(p *Phase) string { return strings.ToUpper(p.Name) })
	row("sensors speak", func(p *Phase) string { return strings.ToUpper(p.Emulator.Protocol) })
	row("policy", func(p *Phase) string { return p.Policy })
	row("brokers used", func(p *Phase) string { return fmt.Sprintf("%d of %d", len(p.Placement), r.Brokers) })
	row("smallest share (r_l, b_l)", func(p *Phase) string {
		if len(p.Placement) == 0 {
			return "-"
		}
		smallest := p.Placement[0]
		for _, q := range p.Placement[1:] {
			if q.RateMilli < smallest.RateMilli || q.RateMilli == smallest.RateMilli && q.Burst < smallest.Burst {
				smallest = q
			}
		}
		return fmt.Sprintf("%s msg/s, %d", rateText(smallest.RateMilli), smallest.Burst)
	})
	row("offered", func(p *Phase) string {
		return fmt.Sprintf("%d (%.0f/s for %.1f s)", p.Emulator.Offered, p.Emulator.OfferedRate, p.Emulator.Seconds)
	})
	row("accepted", func(p *Phase) string {
		return fmt.Sprintf("%d (%.0f/s)", p.Emulator.Accepted, p.Emulator.AchievedRate)
	})
	row("not accepted", func(p *Phase) string {
		e := &p.Emulator
		n := e.RefusedTotal() + e.Skipped + e.Unanswered
		if n == 0 {
			return "0"
		}
		return fmt.Sprintf("%d (%d refused, %d skipped, %d unanswered)", n, e.RefusedTotal(), e.Skipped, e.Unanswered)
	})
	row("delivered", func(p *Phase) string { return strconv.FormatUint(p.Emulator.Delivered, 10) })
	row("lost, duplicated", func(p *Phase) string {
		if p.Emulator.Account == nil {
			return "-"
		}
		return fmt.Sprintf("%d, %d", p.Emulator.Account.Lost, p.Emulator.Account.Duplicated)
	})
	row("end to end p50", us(endToEnd, func(q report.Quantiles) int64 { return q.P50Us }))
	row("end to end p99", us(endToEnd, p99))
	row("end to end p99.9", us(endToEnd, func(q report.Quantiles) int64 { return q.P999Us }))
	row("of it sent late p99", us(func(p *Phase) report.Quantiles { return p.Emulator.Lateness }, p99))
	row("broker: access p99", us(func(p *Phase) report.Quantiles { return broker(p).Access }, p99))
	row("broker: processing p99", us(func(p *Phase) report.Quantiles { return broker(p).Processing }, p99))
	row("broker: delivery p99", us(func(p *Phase) report.Quantiles { return broker(p).Delivery }, p99))
	row("tokens alone: access p99", func(p *Phase) string {
		if p.OnTime == nil {
			return "-"
		}
		return report.Micros(p.OnTime.Access.P99Us)
	})
	row(fmt.Sprintf("broker: later than %v", r.slo()), func(p *Phase) string {
		if p.Broker == nil {
			return "-"
		}
		return percent(p.Broker.ExceedFraction)
	})
	row("SLO", func(p *Phase) string {
		switch {
		case p.Broker == nil:
			return "not measured"
		case p.Broker.SLOMet == nil:
			return "undecided"
		case *p.Broker.SLOMet:
			return "met"
		}
		return "not met"
	})
	return t.Flush()
}

func percent(fraction float64) string { return tuner.Percent(fraction) }

func (r *Report) verdict() string {
	var b strings.Builder
	var accepted, lost, duplicated uint64
	checked := len(r.Phases) > 0
	for i := range r.Phases {
		a := r.Phases[i].Emulator.Account
		if a == nil {
			checked = false
			continue
		}
		accepted += a.Accepted
		lost += a.Lost
		duplicated += a.Duplicated
	}
	switch {
	case !checked:
	case lost+duplicated == 0:
		fmt.Fprintf(&b, "Each of %d accepted messages was delivered exactly once.\n", accepted)
	default:
		fmt.Fprintf(&b, "NOT EXACTLY ONCE: lost %d of %s; %s.\n", lost, plural.Count(accepted, "accepted message"), plural.Count(duplicated, "duplicate delivery"))
	}
	if len(r.Phases) >= 2 && r.Phases[0].Emulator.EndToEnd != nil && r.Phases[1].Emulator.EndToEnd != nil {
		first, blind := &r.Phases[0], &r.Phases[1]
		if first.OnTime != nil && blind.OnTime != nil {
			fmt.Fprintf(&b, "Access delay p99, were every message sent on time: %s as SRTM placed the topic, %s split blindly.\n",
				report.Micros(first.OnTime.Access.P99Us), report.Micros(blind.OnTime.Access.P99Us))
		}
		fmt.Fprintf(&b, "End to end p99: %s as SRTM placed the topic, %s split blindly over %s.\n",
			report.Micros(first.Emulator.EndToEnd.P99Us), report.Micros(blind.Emulator.EndToEnd.P99Us), plural.Count(len(blind.Placement), "broker"))
		if first.Broker != nil && blind.Broker != nil {
			fmt.Fprintf(&b, "Broker-side delivery p99: %s against %s, of it access delay %s against %s.\n",
				report.Micros(first.Broker.Delivery.P99Us), report.Micros(blind.Broker.Delivery.P99Us),
				report.Micros(first.Broker.Access.P99Us), report.Micros(blind.Broker.Access.P99Us))
		}
	}
	for i := range r.Phases {
		for _, note := range r.notes(&r.Phases[i]) {
			fmt.Fprintf(&b, "NOTE: %s: %s.\n", r.Phases[i].Name, note)
		}
	}
	for _, f := range r.Faults() {
		fmt.Fprintf(&b, "FAILED: %s\n", f)
	}
	return b.String()
}
