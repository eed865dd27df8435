package figures

import (
	"slices"
	"strconv"
)

// figure is a set of panels that are made together.
type figure struct {
	page        string // of the evaluation, without ".md"
	name, title string
	make        func(*harness) error
	live        bool // make measures this machine once: see overRuns
}

// figures lists all figures: the paper's in order, then additional ones.
var figures = []figure{
	{"srtm", "6", "DRL penalty for Poisson workloads", penalty, false},
	{"srtm", "7", "impact of concentration", concentration, false},
	{"srtm", "8", "impact of max-min", maxMin, false},
	{"srtm", "8assumed", "impact of max-min, by mcap and b", maxMinAssumed, false},
	{"srtm", "9", "impact of correlation-aware allocation", correlation, false},
	{"srtm", "11", "imprecise correlation", noise, false},
	{"srtm", "table1", "load distribution latency", convergence, false},
	{"beyond", "traces", "recorded traffic", traces, false},
	{"beyond", "learned", "correlation keys learned from arrivals", learned, false},
	{"srtm", "live6", "DRL penalty, live", livePenalty, true},
	{"srtm", "live7", "concentration, live", liveConcentration, true},
	{"srtm", "live8", "max-min, live", liveMaxMin, true},
	{"srtm", "live9", "correlation, live", liveCorrelation, true},
	{"beyond", "livetraces", "recorded traffic, live", liveTraces, true},
	{"janus", "janus5", "Janus: gateway or DNS load balancer", janusBalancer, true},
	{"janus", "janus6", "Janus: keys over servers", janusSpread, false},
	{"janus", "janus7-12", "Janus: scaling", janusScale, false},
	{"janus", "janus13", "Janus: a web application", janusApplication, true},
	{"mqos", "mqos6", "mQoS: the worked example", mqosExample, false},
	{"mqos", "mqos7", "mQoS: shares of each resource", mqosShares, false},
	{"mqos", "mqos8", "mQoS: throughput", mqosThroughput, false},
	{"mqos", "mqos9-11", "mQoS: what is sent, and how long it takes", mqosTypes, false},
	{"jbq", "jbq4", "JBQ: response times by bybusyness", jbqBusy, false},
	{"jbq", "jbq7", "JBQ: the workload", jbqLoad, false},
	{"jbq", "jbq8", "JBQ: response times by JBQ", jbqBest, false},
	{"jbq", "jbqII", "JBQ: three clusters", jbqStatistics, false},
	{"jbq", "jbqIII", "JBQ: each server of the medium cluster", jbqServers, false},
	{"iefxcp", "iefxcp3", "IEFXCP: capacity", iefxcpCapacity, false},
	{"iefxcp", "iefxcp4", "IEFXCP: round-trip time", byRTT.make, false},
	{"iefxcp", "iefxcp5", "IEFXCP: short flows", byWeb.make, false},
	{"iefxcp", "iefxcp6", "IEFXCP: sudden change", iefxcpSudden, false},
	{"iefxcp", "iefxcprouters", "IEFXCP: several routers", iefxcpRouters, false},
	{"iefxcp", "iefxcplive", "IEFXCP: greedy publishers, live", iefxcpLive, true},
	{"iefxcp", "untrusted", "IEFXCP: flows that claim a ToS that is not theirs", untrusted, false},
}

func names() []string {
	all := make([]string, len(figures))
	for i, f := range figures {
		all[i] = f.name
	}
	return all
}

// work is the output of a figure.
type work struct {
	panels []panel
	rows   []row
}

func (k *work) plot(all ...panel) { k.panels = append(k.panels, all...) }
func (k *work) tell(all ...row)   { k.rows = append(k.rows, all...) }

// panel is a plot and its table.
type panel struct {
	// id is the file name without the extension.
	id, title      string
	xLabel, yLabel string
	logX, logY     bool
	// limit is drawn as a horizontal line, in the unit of y; 0: none.
	limit  float64
	series []series
	// header and rows form the CSV file.
	header []string
	rows   [][]string
}

// latencies returns a panel of delivery latencies with the SLO. lead are the first columns
// of the CSV file, before the columns of an outcome.
func latencies(id, title, xLabel string, lead ...string) panel {
	return panel{
		id: id, title: title, xLabel: xLabel, yLabel: "p99 of delivery latency, ms", logY: true, limit: sloMs,
		header: append(lead, columns...),
	}
}

// point adds a point to the named curve. A new curve is added at the end.
func (p *panel) point(name string, x, y float64) { p.spread(name, x, spread{mean: y}) }

// spread adds a point with an error bar.
func (p *panel) spread(name string, x float64, y spread) {
	i := slices.IndexFunc(p.series, func(s series) bool { return s.name == name })
	if i < 0 {
		i = len(p.series)
		p.series = append(p.series, series{name: name})
	}
	p.series[i].add(x, y.mean, y.sd, "")
}

// add adds a row to the CSV file.
func (p *panel) add(values ...any) { p.rows = append(p.rows, cells(values...)) }

// series is a curve of a panel. err and labels may be nil.
type series struct {
	name   string
	x, y   []float64
	err    []float64
	labels []string
}

func (s *series) add(x, y, err float64, label string) {
	s.x, s.y, s.err, s.labels = append(s.x, x), append(s.y, y), append(s.err, err), append(s.labels, label)
}

// curve simulates a point at x. before holds the outcomes of the previous curves at x.
type curve func(x float64, before []*outcome) (*outcome, error)

// points simulates curves at every x, and returns outcomes by x and curve.
func (w *harness) points(xs []float64, curves ...curve) ([][]*outcome, error) {
	got := make([][]*outcome, len(xs))
	return got, w.each(len(xs), func(i int) error {
		for _, c := range curves {
			o, err := c(xs[i], got[i])
			if err != nil {
				return err
			}
			got[i] = append(got[i], o)
		}
		return nil
	})
}

// line describes a series of a panel, made from the outcomes of a curve.
type line struct {
	name string
	of   int // index of the curve
	y    func(*outcome) spread
	// label shows k at each point.
	label bool
	// lead returns the first cells of a row, before the outcome's cells; nil: no rows.
	lead func(x float64, o *outcome) []string
}

func p99Of(o *outcome) spread { return o.p99 }

// named returns a lead of x and the name of a policy.
func named(policy string) func(float64, *outcome) []string {
	return func(x float64, _ *outcome) []string { return []string{number(x), policy} }
}

// fill adds lines to the panel. The plot shows x divided by unit.
func (p panel) fill(xs []float64, unit float64, got [][]*outcome, lines ...line) panel {
	p.series = make([]series, len(lines))
	for j, l := range lines {
		p.series[j].name = l.name
	}
	for i, x := range xs {
		for j, l := range lines {
			o := got[i][l.of]
			if l.lead != nil {
				p.add(l.lead(x, o), o.cells())
			}
			if o.infeasible != "" {
				continue
			}
			label := ""
			if l.label {
				label = strconv.Itoa(o.k)
			}
			y := l.y(o)
			p.series[j].add(x/unit, y.mean, y.sd, label)
		}
	}
	return p
}

// row compares a number of the paper with ours. Unknown fields are empty.
type row struct {
	Figure, Quantity, Paper, Simulated, Live, Note string
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// count returns the number of a curve's outcomes for which so is true.
func count(got [][]*outcome, of int, so func(*outcome) bool) (n int) {
	for _, outcomes := range got {
		if so(outcomes[of]) {
			n++
		}
	}
	return n
}
