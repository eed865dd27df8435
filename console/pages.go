package console

import (
	"context"
	"fmt"
	"html/template"
	"maps"
	"net/url"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/console/history"
	"github.com/srtm-io/srtm/console/why"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/topics"
)

// perPage is the number of topics on a page.
const perPage = 50

// functions are the functions of templates.
var functions = template.FuncMap{
	"count":      func(v any) string { return thousands(fmt.Sprint(v)) },
	"rate":       func(v float64) string { return thousands(strconv.FormatFloat(v, 'f', -1, 64)) },
	"measured":   func(v float32) string { return measured(float64(v)) },
	"measured32": measured,
	"milli":      func(v int64) string { return thousands(strconv.FormatFloat(float64(v)/1000, 'f', -1, 64)) },
	"ms":         func(v float32) string { return why.Duration(time.Duration(float64(v) * 1e6)) },
	"duration":   why.Duration,
	"p99":        func(l *obs.Latency) string { return why.Duration(l.Quantile(0.99)) },
	"ratio":      func(part, whole uint64) float64 { return float64(part) / float64(whole) },
	"percent":    func(v float64) string { return strconv.FormatFloat(100*v, 'f', 2, 64) + " %" },
	"clock":      func(ms int64) string { return time.UnixMilli(ms).UTC().Format("15:04:05") },
	"state":      topics.State,
	"moveReason": topics.MoveReason,
	"slo":        topics.SLO,
	"expiry":     topics.ExpiryText,
	"seconds":    func(d *durationpb.Duration) string { return d.AsDuration().String() },
	"channels":   channelExpiryLines,
	"list":       func(all ...string) []string { return all },
	"button": func(u user, d channelData, what, text, confirm string) pressed {
		return pressed{u, d, what, text, confirm}
	},
	"query": query,
}

// pressed is a button of a channel.
type pressed struct {
	User                user
	Channel             channelData
	What, Text, Confirm string
}

// query builds a link from a path and pairs of names and values.
func query(path string, pairs ...string) string {
	q := url.Values{}
	for i := 0; i+1 < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			q.Set(pairs[i], pairs[i+1])
		}
	}
	if len(q) == 0 {
		return path
	}
	return path + "?" + q.Encode()
}

// measured formats a rate in msg/s: whole numbers, or hundredths of a small rate.
func measured(v float64) string {
	if v >= 10 || v <= 0 {
		return thousands(strconv.FormatFloat(v, 'f', 0, 64))
	}
	return strings.TrimRight(strings.TrimRight(strconv.FormatFloat(v, 'f', 2, 64), "0"), ".")
}

// thousands puts narrow spaces into a number.
func thousands(number string) string {
	whole, fraction, has := strings.Cut(number, ".")
	for i := len(whole) - 3; i > 0 && whole[i-1] != '-'; i -= 3 {
		whole = whole[:i] + "\u202f" + whole[i:]
	}
	if has {
		whole += "." + fraction
	}
	return whole
}

// bar draws a broker's capacity, in percent of the widest bar.
type bar struct {
	*srtmv1.Broker
	McapWide, AllocWide, OfferedPos float64
}

// pager is the shown range of a list, with links to the rest; "": no link.
type pager struct {
	From, To, Total int // From counts from 1
	Back, Forward   string
}

// paged returns the shown part of a list, from the index that the query has under key.
func paged[T any](all []T, path string, q url.Values, key string) ([]T, pager) {
	from, _ := strconv.Atoi(q.Get(key)) // else from the first
	from = min(max(0, from), len(all))
	p := pager{From: min(from+1, len(all)), To: min(from+perPage, len(all)), Total: len(all)}
	link := func(from int) string {
		to := maps.Clone(q)
		to.Set(key, strconv.Itoa(from))
		return path + "?" + to.Encode()
	}
	if from > 0 {
		p.Back = link(max(0, from-perPage))
	}
	if p.To < len(all) {
		p.Forward = link(p.To)
	}
	return all[from:p.To], p
}

type overviewData struct {
	cluster
	Bars    []bar
	Brokers pager
	Rows    []listed
	States  []tally
	Filter  string // part of the names
	State   string
	Pager   pager // of the topics that the filter lets through
}

type tally struct {
	State string
	Count int
	Link  string
}

// listed is a topic in the overview's list.
type listed struct {
	row
	Verdict *why.Verdict // nil: it is not followed
	Last    history.Sample
}

// overview shows brokers and topics.
func (c *Console) overview(_ context.Context, q url.Values, _ user) (view, error) {
	d := overviewData{cluster: c.watched.cluster(), Filter: q.Get("q"), State: q.Get("state")}
	widest := 1.0
	var brokers []*srtmv1.Broker
	brokers, d.Brokers = paged(d.cluster.Brokers, "/ui/", q, "brokers")
	for _, b := range brokers {
		widest = max(widest, float64(b.Mcap), float64(b.Allocated), b.OfferedRate)
	}
	for _, b := range brokers {
		d.Bars = append(d.Bars, bar{
			Broker: b, McapWide: 100 * float64(b.Mcap) / widest,
			AllocWide: 100 * float64(b.Allocated) / widest, OfferedPos: 100 * b.OfferedRate / widest,
		})
	}
	counts := map[string]int{}
	var found []int // among all topics
	for i, t := range d.Topics {
		if !strings.Contains(t.Name, d.Filter) {
			continue
		}
		if counts[t.State]++; d.State == "" || t.State == d.State {
			found = append(found, i)
		}
	}
	found, d.Pager = paged(found, "/ui/", q, "from")
	for _, i := range found {
		d.Rows = append(d.Rows, listed{row: d.Topics[i]})
	}
	for _, state := range []string{"lowering", "raising", "degraded", "placing", "preparing", "deleting", "active"} {
		if counts[state] > 0 {
			d.States = append(d.States, tally{state, counts[state], query("/ui/", "q", d.Filter, "state", state)})
		}
	}
	c.watched.judge(d.Rows)
	return view{Template: "overview", Title: "Overview", Data: d}, nil
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

// part is one broker's data of a topic.
type part struct {
	*srtmv1.BrokerTopicStatus
	Publishers uint32
	Wide       float64 // its share of the contract, in percent
	Offered    float32 // msg/s
	why.Latencies
}

// side is a topic on a page.
type side struct {
	Name string
	known
	Verdict why.Verdict
	Penalty *why.Penalty
	Parts   []part
	Late    []stack
	Given   []given // of the topic, then of its channels; on the page of one topic
	Silent  string  // why a broker of the topic did not answer for Given
}

// stack draws a part of a p99, in percent.
type stack struct {
	Name       string
	Value      float32 // ms
	From, Wide float64
}

// see returns a topic with its evaluation.
func (c *Console) see(ctx context.Context, name string) side {
	s := side{Name: name, known: c.follow(ctx, name)}
	if s.Topic == nil {
		return s
	}
	s.Verdict = why.Judge(s.Topic)
	if p, ok := why.PenaltyOf(s.Topic); ok {
		s.Penalty = &p
	}
	contract := s.Topic.GetSpec().GetContract()
	publishers := map[string]uint32{}
	for _, q := range s.Topic.Quotas {
		publishers[q.BrokerId] = q.Publishers
	}
	for _, b := range s.Topic.GetStatus().GetBrokers() {
		p := part{BrokerTopicStatus: b, Publishers: publishers[b.BrokerId], Latencies: why.LatenciesOf(b.GetWindow())}
		p.Offered = float32(topics.PerSecond(b.GetWindow().GetOffered(), b.GetWindow()))
		if contract.GetRateMilli() > 0 {
			p.Wide = 100 * float64(b.GetShare().GetRateMilli()) / float64(contract.GetRateMilli())
		}
		s.Parts = append(s.Parts, p)
	}
	at := 0.0
	sum := float64(s.Last.Delays[history.Access].P99 + s.Last.Delays[history.Broker].P99 + s.Last.Delays[history.Consumer].P99)
	for i, name := range []string{"access", "broker", "consumer"} {
		value := s.Last.Delays[i].P99
		one := stack{Name: name, Value: value, From: at}
		if sum > 0 {
			one.Wide = 100 * float64(value) / sum
		}
		at += one.Wide
		s.Late = append(s.Late, one)
	}
	return s
}

// topic shows one topic.
func (c *Console) topic(ctx context.Context, q url.Values, _ user) (view, error) {
	s := c.see(ctx, q.Get("name"))
	if s.Topic == nil {
		return view{}, &problem{404, s.Trouble}
	}
	s.Given, s.Silent = c.givenUp(ctx, s.Name)
	return view{Template: "topic", Title: "Topic " + s.Name, Topics: []string{s.Name}, Data: s}, nil
}

// compare shows two topics side by side. The topics need not exist yet.
func (c *Console) compare(ctx context.Context, q url.Values, _ user) (view, error) {
	a, b := q.Get("a"), q.Get("b")
	if a == "" || b == "" {
		return view{}, &problem{400, "Name two topics to compare: ?a=…&b=…"}
	}
	return view{Template: "compare", Title: a + " beside " + b, Topics: []string{a, b}, Data: [2]side{c.see(ctx, a), c.see(ctx, b)}}, nil
}
