package controller

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/reports"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
)

// maxListed limits the topics with series of their own, by name. Each topic has a fixed
// number of series, whatever the number of brokers.
const maxListed = 500

var (
	descBrokers   = prometheus.NewDesc("srtm_brokers_connected", "Brokers with a session.", nil, nil)
	descMcap      = prometheus.NewDesc("srtm_brokers_mcap_messages_per_second", "What the connected brokers carry within the SLO, together.", nil, nil)
	descAllocated = prometheus.NewDesc("srtm_brokers_allocated_messages_per_second", "What is allocated on the connected brokers, together.", nil, nil)
	descNeeded    = prometheus.NewDesc("srtm_brokers_needed", "Brokers that the cluster lacks: topics were refused for want of capacity, miss their SLO on all brokers, or use more than --capacity-threshold. 0 on a follower.", nil, nil)
	descTopics    = prometheus.NewDesc("srtm_topics", "Topics by state.", []string{"state"}, nil)
	descUnlisted  = prometheus.NewDesc("srtm_topics_without_series", "Topics beyond the bound on series per topic.", nil, nil)
	descCreating  = prometheus.NewDesc("srtm_topics_creating", "Creations under way.", nil, nil)
	descFits      = prometheus.NewDesc("srtm_fits_running", "Topics that are being fitted: their publishers send, and they are measured.", nil, nil)
	descWatchers  = prometheus.NewDesc("srtm_watched_topics", "Topics that clients watch.", nil, nil)

	descDelivered = prometheus.NewDesc("srtm_topic_window_delivered_messages", "Messages delivered in the sliding window.", []string{"topic"}, nil)
	descExceeded  = prometheus.NewDesc("srtm_topic_window_exceeded_messages", "Messages delivered in the sliding window later than the SLO's latency.", []string{"topic"}, nil)
	descMet       = prometheus.NewDesc("srtm_topic_slo_met", "1: the SLO is met over the window; 0: it is missed; absent: too few deliveries to tell, or the topic is over its contract.", []string{"topic"}, nil)
	descOver      = prometheus.NewDesc("srtm_topic_over_contract_messages_per_second", "By how much the topic offers more than its contract; 0: it does not, or no longer. While it does, no SLO is owed.", []string{"topic"}, nil)
	descStranded  = prometheus.NewDesc("srtm_topic_publishers_without_broker", "Publishers whose broker has no session with the loaddistributor, or that are not placed.", []string{"topic"}, nil)
	descRefused   = prometheus.NewDesc("srtm_topic_window_unaccepted_messages", "Messages that could not be accepted in the sliding window since publishers had no broker, by the rate that was declared.", []string{"topic"}, nil)
	descAccess    = prometheus.NewDesc("srtm_topic_p99_access_ratio", "Mean of access delay / delivery latency over the deliveries of the window at or above the pooled p99; absent when not measured.", []string{"topic"}, nil)
)

// metrics holds counters and histograms; the collector exports the rest.
type metrics struct {
	ended      *prometheus.HistogramVec // fits, by outcome
	arrivals   *prometheus.CounterVec   // by result
	refused    prometheus.Counter
	undumped   prometheus.Counter
	refusedIDs prometheus.Counter // processes refused because of their broker id
	// Proposed moves, and brokers whose buckets were the cause.
	proposed, bucketLimited prometheus.Counter
}

// newMetrics creates the metrics, and registers them if reg is not nil.
func newMetrics(reg prometheus.Registerer) metrics {
	auto := promauto.With(reg)
	counter := func(name, help string) prometheus.Counter {
		return auto.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	m := metrics{
		ended: auto.NewHistogramVec(prometheus.HistogramOpts{
			Name: "srtm_fit_seconds", Help: "How long fits took, by outcome: kept (a placement was found to keep the SLO), missed (none was), ended (something came between).",
			Buckets: []float64{1, 2, 5, 10, 20, 60, 300, 900, 3600},
		}, []string{"outcome"}),
		arrivals: auto.NewCounterVec(prometheus.CounterOpts{
			Name: "srtm_fit_arrivals_total", Help: "Messages of the arrivals recorded for fits: used, or left out since their publisher is unknown, they were lost by a broker, came late, or another broker's were missing (holed).",
		}, []string{"result"}),
		refused:    counter("srtm_fit_pieces_refused_total", "Pieces of brokers' records of arrivals that cannot be true."),
		refusedIDs: counter("srtm_loaddistributor_broker_ids_refused_total", "Processes refused because their broker id belongs to another process."),
		undumped:   counter("srtm_store_dumps_failed_total", "Dumps of the catalog that the store could not take in the place of its events, which it keeps then."),
		proposed: counter("srtm_rebalance_moves_proposed_total",
			"Moves away from overloaded brokers that were due, carried out or not."),
		bucketLimited: counter("srtm_rebalance_bucket_limited_total",
			"Brokers that missed a topic's SLO because of their share, not of their load."),
	}
	for _, outcome := range []string{tuner.OutcomeKept, tuner.OutcomeMissed, tuner.OutcomeEnded} {
		m.ended.WithLabelValues(outcome)
	}
	m.count(tuner.Counts{})
	return m
}

func (m *metrics) count(c tuner.Counts) {
	for _, r := range []struct {
		result string
		n      uint64
	}{{"used", c.Captured}, {"unknown", c.Unknown}, {"lost", c.Lost}, {"late", c.Late}, {"holed", c.Holed}} {
		m.arrivals.WithLabelValues(r.result).Add(float64(r.n))
	}
	m.refused.Add(float64(c.Refused))
}

// collector exports the controller's present state.
type collector struct {
	cfg     *Config
	mu      *sync.RWMutex
	cat     *pipeline
	brokers *brokers
	topics  *topics
	tuner   *tuner.Tuner
	judge   *judge
	fleet   *fleet
}

func (collector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		descBrokers, descMcap, descAllocated, descNeeded, descTopics, descUnlisted, descCreating, descWatchers, descFits,
		descDelivered, descExceeded, descMet, descOver, descStranded, descRefused, descAccess,
	} {
		out <- d
	}
}

func (m collector) Collect(out chan<- prometheus.Metric) {
	now := time.Now()
	var all []prometheus.Metric // sent without the lock
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		all = append(all, prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...))
	}
	type listed struct {
		topic   string
		reports []reports.Report // immutable
	}
	var windows []listed
	m.mu.RLock()
	var connected, mcap, allocated int64
	for _, b := range m.cat.committed.Brokers() {
		if b.Connected {
			connected++
			mcap += b.Mcap
			allocated += b.Allocated
		}
	}
	gauge(descBrokers, float64(connected))
	gauge(descMcap, float64(mcap))
	gauge(descAllocated, float64(allocated))
	gauge(descNeeded, float64(m.fleet.book.Announced()))
	var creating, watched float64
	for _, l := range m.topics.byName {
		if l.creating != nil {
			creating++
		}
		if len(l.watchers) > 0 {
			watched++
		}
	}
	gauge(descCreating, creating)
	gauge(descWatchers, watched)
	gauge(descFits, float64(m.tuner.Searches()))
	m.mu.RUnlock()

	topics := 0
	states := map[catalog.State]int{}
	eachTopic(m.mu, m.cat, m.topics, func(topic catalog.Topic) {
		states[topic.State]++
		if topics++; topics > maxListed {
			return
		}
		name := topic.Spec.Name()
		window := listed{topic: name}
		var delivered, exceeded uint64
		for _, q := range topic.Plan.Quotas {
			if t := m.brokers.reported(q.Broker).Topic(name); t != nil {
				d, x := t.Counts(now.Add(-m.cfg.Window))
				delivered += d
				exceeded += x
				window.reports = append(window.reports, t.Within(now.Add(-m.cfg.Window))...)
			}
		}
		windows = append(windows, window)
		gauge(descDelivered, float64(delivered), name)
		gauge(descExceeded, float64(exceeded), name)
		overContract, d := 0.0, m.topics.peek(name).condition
		if d.IsOver() {
			overContract = d.ExcessRate
		}
		gauge(descOver, overContract, name)
		if d != nil {
			gauge(descStranded, float64(d.Stranded), name)
			gauge(descRefused, float64(d.Refused()), name)
		}
		switch d.Verdict(topic, m.judge.evidence(name, now), now).Decision {
		case tuner.Within:
			gauge(descMet, 1, name)
		case tuner.Beyond:
			gauge(descMet, 0, name)
		}
	})

	for _, w := range windows { // without the lock, because Add walks all histograms
		var sum reports.Tail
		for _, r := range w.reports {
			sum.Add(r.Stats)
		}
		if f := sum.Fraction(); f != nil {
			gauge(descAccess, *f, w.topic)
		}
	}
	for _, s := range []catalog.State{catalog.Preparing, catalog.Active, catalog.Degraded, catalog.Deleting} {
		gauge(descTopics, float64(states[s]), s.String())
	}
	gauge(descUnlisted, float64(max(0, topics-maxListed)))
	for _, metric := range all {
		out <- metric
	}
}
