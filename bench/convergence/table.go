package convergence

import (
	"fmt"
	"io"
	"strings"

	"github.com/srtm-io/srtm/bench/host"
	"github.com/srtm-io/srtm/tools/iotpub/report"
)

// Report holds all measurements.
type Report struct {
	Version string   `json:"version"`
	CPUs    int      `json:"cpus"`
	Args    []string `json:"args"`
	Rows    []Row    `json:"rows"`
}

// Row is the result of one topic.
type Row struct {
	Group int    `json:"group"`
	Mode  string `json:"mode"`
	Seed  uint64 `json:"seed"`
	// The contract.
	RateMilli int64 `json:"rate_milli"`
	Burst     int64 `json:"burst"`
	// Fit is nil in the mode off.
	Fit *Fit `json:"fit,omitempty"`
	// K is the final number of brokers with the topic, State the loaddistributor's final
	// state of the topic.
	K          int        `json:"k"`
	State      string     `json:"state"`
	Check      Check      `json:"check"`
	Publishers Publishers `json:"publishers"`
}

// Fit describes the search, from the first measurement to the end.
type Fit struct {
	Fitted  bool     `json:"fitted"`
	Reason  string   `json:"reason"`
	Seconds float64  `json:"seconds"`
	Rounds  []Rounds `json:"rounds"`
}

// Rounds is the number of measurements with K brokers.
type Rounds struct {
	K      int `json:"k"`
	Rounds int `json:"rounds"`
}

// Check holds the brokers' combined metrics after the fit.
type Check struct {
	Seconds    float64          `json:"seconds"`
	Messages   uint64           `json:"messages"`
	Late       float64          `json:"late_fraction"`
	Met        *bool            `json:"met,omitempty"` // nil: too few messages to decide
	Delivery   report.Quantiles `json:"delivery"`
	Access     report.Quantiles `json:"access"`
	Processing report.Quantiles `json:"processing"`
}

// Publishers holds iotpub's counters of the whole row.
type Publishers struct {
	Sent     uint64           `json:"sent"`
	Accepted uint64           `json:"accepted"`
	Moved    uint64           `json:"moved"`
	Lost     uint64           `json:"connections_lost"`
	Late     report.Quantiles `json:"sent_late"`
}

// WriteText prints the table for people.
func (r *Report) WriteText(w io.Writer) {
	fmt.Fprintf(w, "%s, %d CPUs: %s\n\n", r.Version, r.CPUs, strings.Join(r.Args, " "))
	host.Head(w, "groups of", "mode", "fitted", "seconds", "rounds", "k", "checked p99", "access", "processing", "late", "SLO", "sent late p99")
	for i := range r.Rows {
		host.Row(w, r.Rows[i].cells()...)
	}
}

func (r *Row) cells() []string {
	fitted, seconds, rounds := "-", "-", "-"
	if f := r.Fit; f != nil {
		fitted, seconds = choose(f.Fitted, "yes", "no"), fmt.Sprintf("%.1f", f.Seconds)
		var attempts []string
		for _, n := range f.Rounds {
			attempts = append(attempts, fmt.Sprintf("%dx%d", n.K, n.Rounds))
		}
		rounds = strings.Join(attempts, " ")
	}
	slo := "undecided"
	if met := r.Check.Met; met != nil {
		slo = choose(*met, "met", "missed")
	}
	p99 := func(q report.Quantiles) string { return report.Micros(q.P99Us) }
	return []string{
		fmt.Sprint(r.Group), r.Mode, fitted, seconds, rounds, fmt.Sprint(r.K), p99(r.Check.Delivery), p99(r.Check.Access), p99(r.Check.Processing),
		fmt.Sprintf("%.2f %%", r.Check.Late*100), slo, p99(r.Publishers.Late),
	}
}

func choose(condition bool, yes, no string) string {
	if condition {
		return yes
	}
	return no
}
