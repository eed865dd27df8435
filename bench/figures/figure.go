package main

// figure is one or several panels that are made together.
type figure struct {
	name, title string
	make        func(*workshop) (*work, error)
}

// figures in the order of the paper, then what goes beyond it.
var figures = []figure{
	{"6", "DRL penalty for Poisson workloads", penalty},
	{"7", "impact of concentration", concentration},
	{"8", "impact of max-min", maxMin},
	{"9", "impact of correlation-aware allocation", correlation},
	{"11", "imprecise correlation", noise},
	{"table1", "load distribution latency", convergence},
	{"traces", "recorded traffic", traces},
	{"scale", "the control plane's own cost", scaleStudy},
	{"live6", "DRL penalty, live", livePenalty},
	{"live7", "concentration, live", liveConcentration},
	{"live8", "max-min, live", liveMaxMin},
	{"live9", "correlation, live", liveCorrelation},
	{"livetraces", "recorded traffic, live", liveTraces},
}

func names() []string {
	all := make([]string, len(figures))
	for i, f := range figures {
		all[i] = f.name
	}
	return all
}

// work is what a figure came to.
type work struct {
	panels []panel
	rows   []row
}

// panel is one plot, and the table that it is drawn from.
type panel struct {
	// id is the file's name without its ending.
	id, title      string
	xLabel, yLabel string
	logX, logY     bool
	// limit is drawn as a line, in the unit of y; 0: none.
	limit  float64
	series []series
	// header and rows are the CSV file's.
	header []string
	rows   [][]string
}

// series is one curve. err and labels may be nil.
type series struct {
	name   string
	x, y   []float64
	err    []float64
	labels []string
}

func (s *series) add(x, y, err float64, label string) {
	s.x, s.y, s.err, s.labels = append(s.x, x), append(s.y, y), append(s.err, err), append(s.labels, label)
}

// row compares one figure of the paper with ours. Empty: there is none.
type row struct {
	Figure, Quantity, Paper, Simulated, Live, Note string
}
