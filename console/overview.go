package console

import (
	"context"
	"net/url"
	"slices"

	"github.com/srtm-io/srtm/console/why"
)

// maxNotes and maxTop limit the lists of the overview.
const (
	maxNotes = 20
	maxTop   = 10
)

// note is something that an operator should look at.
type note struct {
	Text, Link, Class string
	State             string // of a topic or a broker
	Why               string
}

type overviewData struct {
	cluster
	Cards  []card
	Notes  []note
	Bars   []bar
	Rows   []listed
	Topics int
}

// overview shows the cluster at a glance.
func (w *watched) overview(context.Context, url.Values, user) (view, error) {
	now := w.cluster()
	d := overviewData{cluster: now, Cards: w.cards(), Topics: len(now.Topics)}
	for _, b := range now.Brokers {
		n := note{Text: b.Id, Link: query("/ui/broker", "id", b.Id), Class: "warn"}
		switch {
		case !b.Connected:
			n.State, n.Class, n.Why = "disconnected", "bad", "The broker has no session with the loaddistributor."
		case b.SafeToStop:
			n.State, n.Class, n.Why = "safe to stop", "good", "The drain is complete. The process can be stopped."
		case b.Draining:
			n.State, n.Why = "draining", "Its topics move to other brokers."
		default:
			continue
		}
		d.Notes = append(d.Notes, n)
	}
	rows := make([]listed, len(now.Topics))
	for i, t := range now.Topics {
		rows[i] = listed{row: t}
	}
	w.judge(rows)
	for _, r := range rows {
		n := note{Text: r.Name, Link: query("/ui/topic", "name", r.Name), State: r.State, Class: stateClass(r.State), Why: r.Reason}
		if r.Verdict != nil && r.Verdict.SLO == why.Missed {
			n.State, n.Class, n.Why = "SLO missed", "bad", r.Verdict.Text
		} else if r.State == "active" {
			continue
		}
		d.Notes = append(d.Notes, n)
	}
	slices.SortStableFunc(d.Notes, func(a, b note) int { return severity[b.Class] - severity[a.Class] })
	d.Notes = d.Notes[:min(len(d.Notes), maxNotes)]
	slices.SortStableFunc(rows, func(a, b listed) int { return compareRows["offered"](b, a) })
	d.Rows = rows[:min(len(rows), maxTop)]
	busiest := slices.Clone(now.Brokers)
	sorted(busiest, order{key: "allocated", desc: true}, compareBrokers)
	d.Bars = barsOf(busiest[:min(len(busiest), maxTop)])
	return view{Template: "overview", Title: "Overview", Data: d}, nil
}

var severity = map[string]int{"bad": 3, "warn": 2, "": 1}
