package console

import (
	"bytes"
	"context"
	"maps"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/console/why"
)

// fact is a measured value of a broker, in words.
type fact struct{ Text, Value, Class string }

// shownFacts says how metrics of a broker are shown. Values of topics are added up.
var shownFacts = []struct {
	metric, text string
	format       func(v float64) (text, class string)
}{
	{"srtm_nsqd_disk_healthy", "Disk", func(v float64) (string, string) {
		if v == 1 {
			return "healthy", "good"
		}
		return "unhealthy: messages that must be stored are refused", "bad"
	}},
	{"srtm_nsqd_connections", "Client connections", plainly(measured)},
	{"srtm_nsqd_message_memory_bytes", "Messages in memory", plainly(size)},
	{"srtm_nsqd_topic_disk_bytes", "Messages on disk", plainly(size)},
	{"srtm_nsqd_topic_disk_needed_bytes", "of which channels need", plainly(size)},
	{"process_resident_memory_bytes", "Memory of the process", plainly(size)},
	{"process_cpu_seconds_total", "Processor time since the start", plainly(func(v float64) string { return why.Duration(time.Duration(v * float64(time.Second))) })},
	{"srtm_nsqd_loop_slow_turns_total", "Event loop turns over 5 ms", plainly(measured)},
}

func plainly(format func(float64) string) func(float64) (string, string) {
	return func(v float64) (string, string) { return format(v), "" }
}

// factsOf returns the facts that a reading has.
func factsOf(r reading) (all []fact) {
	for _, m := range shownFacts {
		if v, found := r.sums[m.metric]; found {
			text, class := m.format(v)
			all = append(all, fact{m.text, text, class})
		}
	}
	return all
}

// chartMetrics are the metrics that only charts show.
var chartMetrics = []string{
	busyMetric, "srtm_nsqd_topic_latency_seconds", "srtm_nsqd_topic_waiting_messages", "srtm_nsqd_channel_ready_messages",
	"srtm_nsqd_topic_messages_accepted_total", "srtm_nsqd_topic_messages_refused_total", "srtm_nsqd_topic_messages_released_total", "srtm_nsqd_topic_messages_delivered_total",
}

// metrics reads the shown metrics from a broker's metrics text.
func metrics(address string, text []byte, now time.Time) (reading, error) {
	var kept bytes.Buffer
	for line := range bytes.Lines(text) {
		name := bytes.TrimPrefix(line, []byte("# TYPE "))
		if end := bytes.IndexAny(name, "{ \t\n"); end >= 0 && isShown(string(name[:end])) {
			kept.Write(line)
		}
	}
	if bytes.Count(kept.Bytes(), []byte("\n"))+bytes.Count(kept.Bytes(), []byte(",")) > maxElements { // samples and their labels
		return reading{}, tooMany(address)
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, _ := parser.TextToMetricFamilies(&kept) // returns the families before a fault
	return readingOf(slices.Collect(maps.Values(families)), now), nil
}

func isShown(name string) bool {
	for _, suffix := range []string{"_bucket", "_sum", "_count"} { // of histograms
		if whole, ok := strings.CutSuffix(name, suffix); ok && slices.Contains(chartMetrics, whole) {
			return true
		}
	}
	return slices.Contains(chartMetrics, name) || slices.ContainsFunc(shownFacts, func(m struct {
		metric, text string
		format       func(v float64) (text, class string)
	}) bool {
		return m.metric == name
	})
}

type brokerData struct {
	ID      string
	Broker  *srtmv1.Broker // nil: a standalone broker
	Stats   brokerStats
	Facts   []fact
	Loops   []utilised // nil: not known yet
	Pager   pager      // of topics
	Trouble string
}

// broker shows one broker.
func (c *Console) broker(ctx context.Context, q url.Values, _ user) (view, error) {
	d := brokerData{ID: q.Get("id")}
	address, broker, err := c.requester.address(d.ID)
	if err != nil {
		return view{}, err
	}
	d.Broker = broker
	if d.Stats, err = c.requester.stats(ctx, address, "", "", true); err != nil {
		d.Trouble = err.Error()
	}
	if text, err := c.requester.cachedGet(ctx, c.cfg.Brokers, address, "/metrics"); err == nil {
		now := time.Now()
		r, err := metrics(address, text, now)
		if err != nil {
			d.Trouble = err.Error()
		} else if c.clustered() {
			c.watched.sampleBroker(brokerSeries+d.ID, r)
		}
		d.Facts, d.Loops = factsOf(r), c.loops.update(address, r.busy, now)
	}
	v := view{Template: "broker", Title: strings.TrimSpace("Broker " + d.ID), Crumbs: []link{{"Brokers", "/ui/brokers"}}, Topics: []string{brokerSeries + d.ID}}
	path := "/ui/broker"
	if !c.clustered() {
		path, v.Crumbs = "/ui/", nil
		c.watched.cluster() // a page shows the cluster
		if c.cfg.Own == nil {
			v.Topics = nil
		}
	}
	d.Stats.Topics, d.Pager = paged(d.Stats.Topics, path, q, "from")
	d.Stats.Producers = d.Stats.Producers[:min(len(d.Stats.Producers), maxShown)]
	v.Data = d
	return v, nil
}

// sentences returns what a drain waits for as sentences, without flags of a command line:
// the page has buttons for those.
func sentences(w *srtmv1.DrainWait) (all []string) {
	subject := "The broker"
	if w.Topic != "" {
		subject = "Topic " + w.Topic
	}
	for i, part := range append(strings.Split(w.Reason, "; "), strings.Split(w.Remedy, "; ")...) {
		for _, flag := range []string{", or --force", "--force to lose what no consumer takes"} {
			part = strings.ReplaceAll(part, flag, "")
		}
		part = commandLine.ReplaceAllString(part, "")
		if part = strings.TrimSpace(part); part == "" {
			continue
		}
		if i == 0 {
			part = subject + ": " + part
		}
		all = append(all, strings.ToUpper(part[:1])+part[1:]+".")
	}
	return all
}

// commandLine matches a command in a text for people.
var commandLine = regexp.MustCompile(`\s*\(srtm [^)]*\)|,? or ` + "`srtm [^`]*`" + `[^;]*`)
