package console

import (
	"fmt"
	"strings"

	"github.com/srtm-io/srtm/console/history"
	"github.com/srtm-io/srtm/internal/plural"
)

// total is the state of the cluster at one time.
type total struct {
	Offered            float64 // msg/s, at all brokers
	Delivered, Backlog float64 // msg/s and messages, of the followed topics
	Missed, Followed   int     // topics
}

// total adds up what is known now. Requires: mu held.
func (w *watched) total() (t total) {
	for _, b := range w.now.Brokers {
		t.Offered += b.OfferedRate
	}
	for name, topic := range w.topics {
		if isBroker(name) || topic.Topic == nil || topic.Gone {
			continue
		}
		last, _ := topic.series.Last()
		t.Followed++
		t.Delivered += float64(last.Delivered)
		t.Backlog += float64(last.Backlog)
		if s := topic.Topic.GetStatus(); s != nil && s.SloMet != nil && !*s.SloMet && s.GetPooled().GetDelivered() > 0 {
			t.Missed++
		}
	}
	return t
}

// maxTotals is the number of totals in an hour.
const maxTotals = history.MaxSamples / seldom

// sparkPoints is the maximum number of points in a small chart.
const sparkPoints = 60

// spark is a small chart without axes, in a box of 100 by 30.
type spark struct {
	Class, Text  string // Text: for readers who do not see it
	Points, Area string // "": fewer than two values
}

// sparkOf draws values. Each point is the largest of its interval.
func sparkOf(class, unit string, values []float64) spark {
	s := spark{Class: class}
	if len(values) < 2 {
		return s
	}
	var points []float64
	top, n := 0.0, min(len(values), sparkPoints)
	for i := range n {
		highest := 0.0
		for _, v := range values[i*len(values)/n : (i+1)*len(values)/n] {
			highest = max(highest, v)
		}
		points, top = append(points, highest), max(top, highest)
	}
	var b strings.Builder
	for i, v := range points {
		y := 29.0
		if top > 0 {
			y = 29 - 27*v/top
		}
		fmt.Fprintf(&b, "%.1f,%.1f ", 100*float64(i)/float64(n-1), y)
	}
	s.Points = strings.TrimSpace(b.String())
	s.Area = "0,30 " + s.Points + " 100,30"
	s.Text = fmt.Sprintf("The last hour: at most %s %s", measured(top), unit)
	return s
}

// card is a figure of the cluster with its last hour.
type card struct {
	Name, Value, Unit, Note string
	Class                   string // of the value
	Spark                   spark
}

// cards returns the figures of the overview.
func (w *watched) cards() []card {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := w.total()
	draw := func(class, unit string, value func(total) float64) spark {
		values := make([]float64, 0, len(w.totals)+1)
		for _, t := range append(w.totals, now) {
			values = append(values, value(t))
		}
		return sparkOf(class, unit, values)
	}
	part := ""
	if now.Followed < len(w.now.Topics) {
		part = fmt.Sprintf("of %s that the console follows", plural.Count(now.Followed, "topic"))
	}
	class := "good"
	if now.Missed > 0 {
		class = "bad"
	}
	return []card{
		{"Offered", measured(now.Offered), "msg/s", "", "", draw("offered", "msg/s", func(t total) float64 { return t.Offered })},
		{"Delivered", measured(now.Delivered), "msg/s", part, "", draw("delivered", "msg/s", func(t total) float64 { return t.Delivered })},
		{"Backlog", measured(now.Backlog), "messages", part, "", draw("backlog", "messages", func(t total) float64 { return t.Backlog })},
		{"Topics outside their SLO", fmt.Sprint(now.Missed), fmt.Sprintf("of %d", now.Followed), part, class, draw("missed", "topics", func(t total) float64 { return float64(t.Missed) })},
	}
}
