package console

import (
	"cmp"
	"context"
	"net/url"
	"strings"

	"github.com/srtm-io/srtm/console/history"
	"github.com/srtm-io/srtm/console/why"
)

type topicsData struct {
	cluster
	Order  order
	Rows   []listed
	States []tally
	Filter string // part of the names
	Gone   string // the topic that was just deleted
	State  string
	Pager  pager // of the topics that the filter lets through
}

type tally struct {
	State string
	Count int
	Link  string
}

// listed is a topic in a list.
type listed struct {
	row
	Verdict *why.Verdict // nil: the console does not follow it
	Last    history.Sample
}

// compareRows compares topics by the columns of a list. Topics that the console does not
// follow are the least.
var compareRows = map[string]func(a, b listed) int{
	"name":    func(a, b listed) int { return cmp.Compare(a.Name, b.Name) },
	"slo":     func(a, b listed) int { return cmp.Compare(verdictOf(a), verdictOf(b)) },
	"state":   func(a, b listed) int { return cmp.Compare(a.State, b.State) },
	"rate":    func(a, b listed) int { return cmp.Compare(a.Rate, b.Rate) },
	"burst":   func(a, b listed) int { return cmp.Compare(a.Burst, b.Burst) },
	"brokers": func(a, b listed) int { return cmp.Compare(a.Brokers, b.Brokers) },
	"offered": func(a, b listed) int { return cmp.Compare(a.Last.Offered, b.Last.Offered) },
	"backlog": func(a, b listed) int { return cmp.Compare(a.Last.Backlog, b.Last.Backlog) },
	"p99": func(a, b listed) int {
		return cmp.Compare(a.Last.Delays[history.Delivery].P99, b.Last.Delays[history.Delivery].P99)
	},
}

func verdictOf(l listed) string {
	if l.Verdict == nil {
		return ""
	}
	return l.Verdict.SLO
}

// topicList lists the topics.
func (w *watched) topicList(_ context.Context, q url.Values, _ user) (view, error) {
	d := topicsData{cluster: w.cluster(), Filter: q.Get("q"), State: q.Get("state"), Gone: q.Get("deleted"), Order: orderOf("/ui/topics", q, "name")}
	counts := map[string]int{}
	var matching []listed
	for _, t := range d.Topics {
		if !strings.Contains(t.Name, d.Filter) {
			continue
		}
		if counts[t.State]++; d.State == "" || t.State == d.State {
			matching = append(matching, listed{row: t})
		}
	}
	if d.Order.key != "name" || d.Order.desc { // the list is by name
		w.judge(matching)
		sorted(matching, d.Order, compareRows)
	}
	d.Rows, d.Pager = paged(matching, "/ui/topics", q, "from")
	for _, state := range []string{"lowering", "raising", "degraded", "placing", "preparing", "deleting", "active"} {
		if counts[state] > 0 {
			d.States = append(d.States, tally{state, counts[state], query("/ui/topics", "q", d.Filter, "state", state)})
		}
	}
	w.judge(d.Rows)
	return view{Template: "topics", Title: "Topics", Data: d}, nil
}

// stateClass returns the class of a topic's state.
func stateClass(state string) string {
	switch state {
	case "active":
		return "good"
	case "degraded":
		return "bad"
	case "lowering", "raising", "deleting":
		return "warn"
	}
	return ""
}

// judge adds the verdicts of followed topics.
func (w *watched) judge(rows []listed) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i := range rows {
		if t := w.topics[rows[i].Name]; t != nil && t.Topic != nil {
			v := why.Judge(t.Topic)
			rows[i].Verdict = &v
			rows[i].Last, _ = t.series.Last()
		}
	}
}
