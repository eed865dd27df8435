package up

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/tools/iotpub/report"
	"github.com/srtm-io/srtm/tools/srtm/screen"
)

// lineEvery is the interval between lines of a view without a terminal.
const lineEvery = 5 * time.Second

// view shows the progress of a run: on a terminal a table that is redrawn in place,
// elsewhere a line every few seconds.
type view struct {
	w io.Writer // set once

	mu     sync.Mutex
	screen *screen.Screen     // guarded by mu
	last   map[string]float64 // guarded by mu; elapsed seconds at the last line, by title
	tables map[string]string  // guarded by mu; of the running phases, by title
}

// newView shows the run on standard output, or on standard error if standard output
// carries JSON.
func newView(cmd *cobra.Command, output string) *view {
	w := cmd.OutOrStdout()
	if output == "json" {
		w = cmd.ErrOrStderr()
	}
	return &view{w: w, screen: screen.New(w)}
}

// printf prints a line, best effort.
func (v *view) printf(format string, args ...any) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.screen.Leave()
	fmt.Fprintf(v.w, format+"\n", args...)
}

// frame is the content of one update.
type frame struct {
	title    string
	duration time.Duration
	progress *report.Progress
	topic    *srtmv1.Topic
	brokers  int
}

func (v *view) draw(f *frame) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.last == nil {
		v.last, v.tables = map[string]float64{}, map[string]string{}
	}
	if !v.screen.Terminal {
		last := v.last[f.title]
		if f.progress.ElapsedSeconds-last < lineEvery.Seconds()-0.5 && last != 0 {
			return
		}
		v.last[f.title] = f.progress.ElapsedSeconds
		fmt.Fprintln(v.w, f.line())
		return
	}
	v.tables[f.title] = f.table()
	all := ""
	for _, title := range slices.Sorted(maps.Keys(v.tables)) {
		all += v.tables[title]
	}
	_ = v.screen.Draw(all)
}

// done keeps the last table of a phase on the screen.
func (v *view) done(title string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.screen.Leave()
	delete(v.tables, title)
	delete(v.last, title)
}

// line formats a frame without a terminal.
func (f *frame) line() string {
	p := f.progress
	pooled := f.topic.GetStatus().GetPooled()
	return fmt.Sprintf("%s: %.0f of %.0f s, %s, offered %.0f/s, accepted %.0f/s, delivered %.0f/s, access p99 %s, processing p99 %s, delivery p99 %s, %s",
		f.title, p.ElapsedSeconds, f.duration.Seconds(), plural.Count(len(f.topic.GetQuotas()), "broker"),
		p.OfferedRate, p.AcceptedRate, p.DeliveredRate,
		p99(pooled.GetAccess()), p99(pooled.GetProcessing()), p99(pooled.GetDelivery()), f.slo())
}

// slo is the pooled exceed fraction against the SLO.
func (f *frame) slo() string {
	slo := f.topic.GetSpec().GetContract().GetSlo()
	status := f.topic.GetStatus()
	if status.GetPooled().GetDelivered() == 0 {
		return "no delivery yet"
	}
	verdict := "undecided"
	if status.SloMet != nil {
		verdict = map[bool]string{true: "met", false: "not met"}[status.GetSloMet()]
	}
	return fmt.Sprintf("%s later than %v (SLO %s: %s)", percent(status.GetExceedFraction()), slo.GetLatency().AsDuration(), percent(1-slo.GetQuantile()), verdict)
}

// table formats a frame for a terminal.
func (f *frame) table() string {
	var b strings.Builder
	p := f.progress
	fmt.Fprintf(&b, "%s   %.0f of %.0f s   offered %.0f/s   accepted %.0f/s   delivered %.0f/s   sent late p99 %s   end to end p99 %s\n",
		f.title, p.ElapsedSeconds, f.duration.Seconds(), p.OfferedRate, p.AcceptedRate, p.DeliveredRate,
		report.Micros(p.Lateness.P99Us), report.Micros(p.EndToEnd.P99Us))
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "broker\tpublishers\tr_l\tb_l\tmsg/s\taccess p99\tprocessing p99\tdelivery p99\t")
	for _, s := range f.topic.GetStatus().GetBrokers() {
		last, window := s.GetLast(), s.GetWindow()
		rate := "-"
		if d := last.GetInterval().AsDuration().Seconds(); d > 0 {
			rate = strconv.FormatFloat(float64(last.GetOffered())/d, 'f', 0, 64)
		}
		fmt.Fprintf(t, "%s\t%d\t%s\t%d\t%s\t%s\t%s\t%s\t\n", s.GetBrokerId(), last.GetPublishers(),
			rateText(s.GetShare().GetRateMilli()), s.GetShare().GetBurst(), rate,
			p99(window.GetAccess()), p99(window.GetProcessing()), p99(window.GetDelivery()))
	}
	_ = t.Flush() // to a strings.Builder
	if idle := f.brokers - len(f.topic.GetQuotas()); idle > 0 {
		fmt.Fprintf(&b, "and %s without a part of this topic\n", plural.Count(idle, "broker"))
	}
	fmt.Fprintf(&b, "topic %s: %s\n", f.topic.GetSpec().GetName(), f.slo())
	return b.String()
}

func p99(h *srtmv1.Histogram) string {
	q := quantiles(h)
	if q.Count == 0 {
		return "-"
	}
	return report.Micros(q.P99Us)
}
