// Package report defines the output of an iotpub run: lines of progress and a final report,
// as JSON for tools/srtm/up and other programs, and as text for people. The package holds
// results, and decides only whether a run has failed.
package report

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/tools/iotpub/verify"
)

// Types of lines, in the field "type".
const (
	TypeProgress = "progress"
	TypeReport   = "report"
)

// Quantiles of a latency in microseconds, each rounded up by less than 1 %,
// from a histogram that reaches from 1 us to 60 s.
type Quantiles struct {
	Count  int64 `json:"count"`
	P50Us  int64 `json:"p50_us"`
	P90Us  int64 `json:"p90_us"`
	P99Us  int64 `json:"p99_us"`
	P999Us int64 `json:"p999_us"`
	MaxUs  int64 `json:"max_us"`
	// Clamped counts samples outside the range.
	Clamped int64 `json:"clamped,omitempty"`
}

// At returns the given quantile, or the next larger quantile in q.
func (q Quantiles) At(quantile float64) time.Duration {
	us := q.MaxUs
	switch {
	case quantile <= 0.5:
		us = q.P50Us
	case quantile <= 0.9:
		us = q.P90Us
	case quantile <= 0.99:
		us = q.P99Us
	case quantile <= 0.999:
		us = q.P999Us
	}
	return time.Duration(us) * time.Microsecond
}

// QuantilesOf returns the quantiles of l.
func QuantilesOf(l *histogram.Latency) Quantiles {
	us := func(q float64) int64 { return l.Quantile(q).Microseconds() }
	return Quantiles{
		Count: l.Count(), P50Us: us(0.5), P90Us: us(0.9), P99Us: us(0.99), P999Us: us(0.999), MaxUs: us(1),
		Clamped: l.Clamped(),
	}
}

// P99 returns the quantile as a duration.
func (q Quantiles) P99() time.Duration { return time.Duration(q.P99Us) * time.Microsecond }

// Counts are messages since the start of a run, not commands.
type Counts struct {
	// Offered: due by now, according to the schedule. Sent: written to a connection.
	Offered uint64 `json:"offered"`
	Sent    uint64 `json:"sent"`
	// Accepted: answered with OK. Refused: answered with an error, by error code.
	Accepted uint64            `json:"accepted"`
	Refused  map[string]uint64 `json:"refused,omitempty"`
	// Unanswered: sent on a connection that ended before the reply. The broker may have
	// accepted these messages. iotpub does not send them again, so it never causes a
	// duplicate.
	Unanswered uint64 `json:"unanswered"`
	// Skipped: not sent, because the publisher had no connection for too long, or because
	// the connection was full.
	Skipped uint64 `json:"skipped"`
	// Held: delayed for the same reasons. Held messages also count as Sent or Skipped.
	Held       uint64 `json:"held,omitempty"`
	Delivered  uint64 `json:"delivered"`
	Duplicated uint64 `json:"duplicated"`
}

// RefusedTotal sums Refused.
func (c Counts) RefusedTotal() uint64 {
	var n uint64
	for _, v := range c.Refused {
		n += v
	}
	return n
}

// Progress is one line during a run. Rates cover the time since the previous line, in
// msg/s. Latencies cover the whole run.
type Progress struct {
	Type           string  `json:"type"`
	ElapsedSeconds float64 `json:"elapsed_s"`
	Counts
	OfferedRate   float64   `json:"offered_per_s"`
	AcceptedRate  float64   `json:"accepted_per_s"`
	DeliveredRate float64   `json:"delivered_per_s"`
	Connected     int       `json:"connected"`
	Lost          uint64    `json:"connections_lost"`
	Moved         uint64    `json:"publishers_moved"`
	Lateness      Quantiles `json:"lateness"`
	EndToEnd      Quantiles `json:"end_to_end"`
}

// Report is the last line of a run.
type Report struct {
	Type       string `json:"type"`
	Version    string `json:"version"`
	Topic      string `json:"topic"`
	Seed       uint64 `json:"seed"`
	Load       string `json:"load"`
	Publishers int    `json:"publishers"`
	// Protocol of the publishers: nsq, or mqtt (5.0, quality of service 1).
	Protocol string  `json:"protocol"`
	Planned  float64 `json:"planned_s"`
	// Seconds is the time during which messages were offered.
	Seconds     float64 `json:"seconds"`
	Interrupted bool    `json:"interrupted,omitempty"`
	Counts
	// OfferedRate is the scheduled rate, AchievedRate the accepted rate, in msg/s. If the
	// last OK came after the end, AchievedRate covers the time until the last OK.
	OfferedRate  float64 `json:"offered_per_s"`
	AchievedRate float64 `json:"achieved_per_s"`
	Lost         uint64  `json:"connections_lost"`
	Moved        uint64  `json:"publishers_moved"`
	Strange      uint64  `json:"strange_answers,omitempty"`
	LastError    string  `json:"last_error,omitempty"`

	// Times from the intended send time: Lateness to the write, Answer to the OK, EndToEnd
	// to the subscriber's handler.
	Lateness Quantiles  `json:"lateness"`
	Answer   Quantiles  `json:"answer"`
	EndToEnd *Quantiles `json:"end_to_end,omitempty"`

	// Account is nil without a subscriber.
	Account *verify.Result   `json:"account,omitempty"`
	Missing []verify.Message `json:"missing,omitempty"`

	// Background is nil without a background load.
	Background *Background `json:"background,omitempty"`

	// CPUSeconds is the processor time of this process, including the subscriber.
	CPUSeconds float64 `json:"cpu_s"`
}

// Background is the result of the additional load. A fault of the background is no fault of
// the run.
type Background struct {
	Topic      string `json:"topic"`
	Publishers int    `json:"publishers"`
	Counts
	// OfferedRate and AcceptedRate are means over the run, msg/s.
	OfferedRate  float64   `json:"offered_per_s"`
	AcceptedRate float64   `json:"accepted_per_s"`
	Lost         uint64    `json:"connections_lost"`
	Lateness     Quantiles `json:"lateness"`
	EndToEnd     Quantiles `json:"end_to_end"`
}

// AchievedFraction is AchievedRate / OfferedRate, or 1 if nothing was offered.
func (r *Report) AchievedFraction() float64 {
	if r.OfferedRate == 0 {
		return 1
	}
	return r.AchievedRate / r.OfferedRate
}

// Fault explains why a run has failed, or returns "". A run fails if an accepted message is
// missing or duplicated, or if no message was accepted.
func (r *Report) Fault() string {
	var faults []string
	if a := r.Account; a != nil {
		if a.Lost > 0 {
			faults = append(faults, "lost "+plural.Count(a.Lost, "accepted message"))
		}
		if a.Duplicated > 0 {
			faults = append(faults, plural.Count(a.Duplicated, "message")+" delivered more than once")
		}
	}
	if r.Accepted == 0 && r.Offered > 0 {
		faults = append(faults, "no message was accepted")
	}
	return strings.Join(faults, "; ")
}

// Micros formats microseconds for people.
func Micros(us int64) string {
	d := time.Duration(us) * time.Microsecond
	switch {
	case d >= 10*time.Second:
		return d.Round(100 * time.Millisecond).String()
	case d >= 100*time.Millisecond:
		return d.Round(time.Millisecond).String()
	case d >= 10*time.Millisecond:
		return d.Round(100 * time.Microsecond).String()
	case d >= time.Millisecond:
		return d.Round(10 * time.Microsecond).String()
	}
	return d.String()
}

// RefusedText lists refusals by code, largest first.
func RefusedText(refused map[string]uint64) string {
	codes := slices.Sorted(maps.Keys(refused))
	slices.SortStableFunc(codes, func(a, b string) int { return cmp.Compare(refused[b], refused[a]) })
	parts := make([]string, len(codes))
	for i, code := range codes {
		parts[i] = fmt.Sprintf("%d %s", refused[code], code)
	}
	return strings.Join(parts, ", ")
}

// WriteText prints a line of progress for people.
func (p *Progress) WriteText(w io.Writer) error {
	_, err := fmt.Fprintf(w, "%6.1f s  offered %.0f/s  accepted %.0f/s  delivered %.0f/s  connected %d  refused %d  lateness p99 %s  end to end p99 %s\n",
		p.ElapsedSeconds, p.OfferedRate, p.AcceptedRate, p.DeliveredRate, p.Connected, p.RefusedTotal(),
		Micros(p.Lateness.P99Us), Micros(p.EndToEnd.P99Us))
	return err
}

// WriteText prints the report for people.
func (r *Report) WriteText(w io.Writer) error {
	var b strings.Builder
	row := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "%-12s "+format+"\n", append([]any{name}, args...)...)
	}
	row("load", "%s", r.Load)
	row("topic", "%s, %s, seed %d", r.Topic, plural.Count(r.Publishers, "publisher"), r.Seed)
	ended := ""
	if r.Interrupted {
		ended = ", interrupted"
	}
	row("time", "%.1f s of %.1f s%s, CPU %.2f s", r.Seconds, r.Planned, ended, r.CPUSeconds)
	row("offered", "%s, %.1f/s", plural.Count(r.Offered, "message"), r.OfferedRate)
	row("achieved", "%d accepted, %.1f/s (%.2f %%)", r.Accepted, r.AchievedRate, 100*r.AchievedFraction())
	if n := r.RefusedTotal() + r.Skipped + r.Unanswered; n > 0 {
		row("not accepted", "%d: %d refused%s, %d skipped, %d unanswered", n, r.RefusedTotal(), bracketed(RefusedText(r.Refused)), r.Skipped, r.Unanswered)
	}
	if r.Lost+r.Moved+r.Strange > 0 {
		row("connections", "%d lost, %d moved, %s%s", r.Lost, r.Moved, plural.Count(r.Strange, "strange answer"), bracketed(r.LastError))
	}
	latency := func(name string, q Quantiles) {
		row(name, "p50 %s, p90 %s, p99 %s, p99.9 %s, max %s (%d)",
			Micros(q.P50Us), Micros(q.P90Us), Micros(q.P99Us), Micros(q.P999Us), Micros(q.MaxUs), q.Count)
	}
	latency("lateness", r.Lateness)
	latency("answer", r.Answer)
	if r.EndToEnd != nil {
		latency("end to end", *r.EndToEnd)
	}
	if a := r.Account; a != nil {
		row("delivered", "%d of %d accepted: %d lost, %d duplicated, %d delivered without an OK, %d foreign",
			a.Delivered-a.Unaccepted, a.Accepted, a.Lost, a.Duplicated, a.Unaccepted, a.Foreign)
	}
	if b := r.Background; b != nil {
		row("background", "%s, %s: %.1f/s offered, %.1f/s accepted, %d refused, %s lost; end to end p50 %s, p99 %s",
			b.Topic, plural.Count(b.Publishers, "publisher"), b.OfferedRate, b.AcceptedRate, b.RefusedTotal(), plural.Count(b.Lost, "connection"), Micros(b.EndToEnd.P50Us), Micros(b.EndToEnd.P99Us))
	}
	if fault := r.Fault(); fault != "" {
		row("FAILED", "%s", fault)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func bracketed(s string) string {
	if s == "" {
		return ""
	}
	return " (" + s + ")"
}
