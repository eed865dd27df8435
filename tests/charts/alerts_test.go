package charts

import (
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"github.com/prometheus/prometheus/tsdb/chunks"
	"github.com/prometheus/prometheus/util/annotations"
)

// The number of series that each alert's expression finds in an hour of samples, a minute apart. The
// alert's "for" is not tested.
var alerts = map[string][]struct {
	series string
	found  int
}{
	"SRTMTopicMissesSLO": {
		{`srtm_topic_slo_met{topic="a"} 1x50 0x10` + "\n" + `srtm_topic_slo_met{topic="b"} 1x60` + "\n" + `srtm_topic_slo_met{topic="c"} 0x50 1x10`, 1},
		{`srtm_topic_slo_met{topic="b"} 1x60`, 0},
		{`srtm_topic_slo_met{topic="a"} 0x50 _x10`, 0}, // undecided: absent
	},
	"SRTMTopicLate": {
		{`srtm_nsqd_topic_messages_exceeded_total{topic="a",instance="1"} 0+10x60` + "\n" + `srtm_nsqd_topic_messages_delivered_total{topic="a",instance="1"} 0+100x60`, 1},
		{`srtm_nsqd_topic_messages_exceeded_total{topic="a",instance="1"} 0+1x60` + "\n" + `srtm_nsqd_topic_messages_delivered_total{topic="a",instance="1"} 0+100x60`, 0},
		{`srtm_nsqd_topic_messages_exceeded_total{topic="a",instance="1"} 0x60` + "\n" + `srtm_nsqd_topic_messages_delivered_total{topic="a",instance="1"} 0x60`, 0},
	},
	"SRTMPublishersWithoutBroker": {{`srtm_topic_publishers_without_broker{topic="a"} 0x59 3`, 1}, {`srtm_topic_publishers_without_broker{topic="a"} 0x60`, 0}},
	"SRTMTopicOverContract":       {{`srtm_topic_over_contract_messages_per_second{topic="a"} 12x60`, 1}, {`srtm_topic_over_contract_messages_per_second{topic="a"} 0x60`, 0}},
	"SRTMPublishesRefused":        {{`srtm_nsqd_topic_messages_refused_total{topic="a",instance="1"} 0+1x60`, 1}, {`srtm_nsqd_topic_messages_refused_total{topic="a",instance="1"} 7x60`, 0}},
	"SRTMChannelWithoutConsumer": {
		{`srtm_nsqd_channel_subscribers{topic="a",channel="c",instance="1"} 0x60` + "\n" + `srtm_nsqd_channel_ready_messages{topic="a",channel="c",instance="1"} 0+5x60`, 1},
		{`srtm_nsqd_channel_subscribers{topic="a",channel="c",instance="1"} 1x60` + "\n" + `srtm_nsqd_channel_ready_messages{topic="a",channel="c",instance="1"} 0+5x60`, 0},
		{`srtm_nsqd_channel_subscribers{topic="a",channel="c",instance="1"} 0x60` + "\n" + `srtm_nsqd_channel_ready_messages{topic="a",channel="c",instance="1"} 5x60`, 0},
	},
	"SRTMDiskUnhealthy": {{`srtm_nsqd_disk_healthy{instance="1"} 1x59 0`, 1}, {`srtm_nsqd_disk_healthy{instance="1"} 1x60`, 0}},
	"SRTMDiskDamaged":   {{`srtm_nsqd_disk_unreadable_messages{instance="1"} 1x60`, 1}, {`srtm_nsqd_disk_unreadable_messages{instance="1"} 0x60`, 0}},
	"SRTMMessagesMissing": {
		{`srtm_nsqd_topic_disk_faults_total{instance="1",topic="a",kind="missing"} 1x60`, 1},
		{`srtm_nsqd_topic_disk_faults_total{instance="1",topic="a",kind="missing"} 0x60` + "\n" + `srtm_nsqd_topic_disk_faults_total{instance="1",topic="a",kind="torn"} 1x60`, 0},
	},
	"SRTMBrokerCutOff":        {{`srtm_agent_connected{session="control"} 0x60`, 1}, {`srtm_agent_connected{session="control"} 1x60`, 0}},
	"SRTMShareIdle":           {{`srtm_tbadaptor_share_idle_rate{topic="a",broker="b1"} 5x60`, 1}, {`srtm_tbadaptor_share_idle_rate{topic="a",broker="b1"} 0x60`, 0}},
	"SRTMClusterNearlySold":   {{"srtm_brokers_allocated_messages_per_second 95x60\nsrtm_brokers_mcap_messages_per_second 100x60", 1}, {"srtm_brokers_allocated_messages_per_second 85x60\nsrtm_brokers_mcap_messages_per_second 100x60", 0}, {"srtm_brokers_allocated_messages_per_second 0x60\nsrtm_brokers_mcap_messages_per_second 0x60", 0}},
	"SRTMTopicsWithoutSeries": {{`srtm_topics_without_series 4x60`, 1}, {`srtm_nsqd_names_without_series{instance="1",kind="channel"} 4x60`, 1}, {`srtm_topics_without_series 0x60`, 0}},
	"SRTMConnectionsRefused":  {{`srtm_nsqd_connections_refused_total{instance="1"} 0+1x60`, 1}, {`srtm_nsqd_connections_refused_total{instance="1"} 1x60`, 0}},
	"SRTMCertificateExpires":  {{`srtm_tls_certificate_expiry_timestamp_seconds{instance="1"} 608000x60`, 1}, {`srtm_tls_certificate_expiry_timestamp_seconds{instance="1"} 609000x60`, 0}},
	"SRTMLogLost":             {{`srtm_log_lines_dropped_total{instance="1"} 0+1x60`, 1}, {`srtm_log_lines_dropped_total{instance="1"} 1x60`, 0}},
	"SRTMDaemonDown":          {{`up{job="srtm-nsqd"} 0x60`, 1}, {`up{job="other"} 0x60` + "\n" + `up{job="srtm-nsqd"} 1x60`, 0}},
}

func TestAlerts(t *testing.T) {
	file := filepath.Join(deploy, "prometheus", "alerts.yaml")
	groups, errs := rulefmt.ParseFile(file, false, model.UTF8Validation, parser.NewParser(parser.Options{}), slog.New(slog.DiscardHandler))
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	seen := 0
	for _, g := range groups.Groups {
		for _, r := range g.Rules {
			cases := alerts[r.Alert]
			if len(cases) < 2 {
				t.Errorf("%s is not tested", r.Alert)
			}
			seen++
			if r.Annotations["summary"] == "" || r.Annotations["description"] == "" || r.Labels["severity"] == "" {
				t.Errorf("%s does not say what it means, and to whom", r.Alert)
			}
			lasting := r.Alert == "SRTMDiskDamaged" || r.Alert == "SRTMMessagesMissing" // until an operator looks
			if r.For == 0 && !lasting {
				t.Errorf("%s does not wait", r.Alert)
			}
			for _, c := range cases {
				found := evaluate(t, c.series, r.Expr)
				if found != c.found {
					t.Errorf("%s finds %d series, want %d, in\n%s", r.Alert, found, c.found, c.series)
				}
			}
		}
	}
	if seen != len(alerts) {
		t.Errorf("%d alerts, and cases of %d", seen, len(alerts))
	}
}

// evaluate returns how many series an expression has after an hour.
func evaluate(t *testing.T, series, expr string) int {
	t.Helper()
	engine := promql.NewEngine(promql.EngineOpts{MaxSamples: 1e6, Timeout: time.Minute, Parser: parser.NewParser(parser.Options{})})
	defer engine.Close()
	storage := &storage.MockQueryable{MockQuerier: &storage.MockQuerier{SelectMockFunction: samples(t, series)}}
	query, err := engine.NewInstantQuery(t.Context(), storage, nil, expr, time.Unix(3600, 0))
	if err != nil {
		t.Fatal(err)
	}
	defer query.Close()
	result := query.Exec(t.Context())
	vector, err := result.Vector()
	if err != nil {
		t.Fatalf("%s: %v", expr, err)
	}
	return len(vector)
}

// samples reads series in Prometheus' notation for tests, one per line, with a sample a minute.
func samples(t *testing.T, lines string) func(bool, *storage.SelectHints, ...*labels.Matcher) storage.SeriesSet {
	t.Helper()
	var all []storage.Series
	for line := range strings.Lines(lines) {
		names, values, err := parser.NewParser(parser.Options{}).ParseSeriesDesc(strings.TrimSpace(line))
		if err != nil {
			t.Fatal(err)
		}
		var samples []chunks.Sample
		for i, v := range values {
			if !v.Omitted {
				samples = append(samples, sample{at: int64(i) * 60_000, is: v.Value})
			}
		}
		all = append(all, storage.NewListSeries(names, samples))
	}
	return func(_ bool, _ *storage.SelectHints, matchers ...*labels.Matcher) storage.SeriesSet {
		found := &set{}
		for _, s := range all {
			matches := true
			for _, m := range matchers {
				matches = matches && m.Matches(s.Labels().Get(m.Name))
			}
			if matches {
				found.all = append(found.all, s)
			}
		}
		return found
	}
}

// sample is a chunks.Sample of a number.
type sample struct {
	chunks.Sample
	at int64 // ms
	is float64
}

func (s sample) T() int64                 { return s.at }
func (s sample) ST() int64                { return 0 }
func (s sample) F() float64               { return s.is }
func (s sample) Type() chunkenc.ValueType { return chunkenc.ValFloat }
func (s sample) Copy() chunks.Sample      { return s }

// set is a storage.SeriesSet; next is the index after the series that At returns.
type set struct {
	all  []storage.Series
	next int
}

func (s *set) Next() bool                        { s.next++; return s.next <= len(s.all) }
func (s *set) At() storage.Series                { return s.all[s.next-1] }
func (s *set) Err() error                        { return nil }
func (s *set) Warnings() annotations.Annotations { return nil }

// The dashboards' expressions are PromQL, with Grafana's variables put in.
func TestDashboards(t *testing.T) {
	files, _ := filepath.Glob(filepath.Join(deploy, "grafana", "*.json"))
	if len(files) < 2 {
		t.Fatalf("dashboards: %q", files)
	}
	uids := map[string]bool{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var board struct {
			UID    string
			Panels []struct {
				ID                 int
				Title, Description string
				GridPos            struct{ X, Y, W, H int }
				Targets            []struct{ Expr string }
			}
		}
		if err := json.Unmarshal(text, &board); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		if board.UID == "" || uids[board.UID] || len(board.Panels) < 5 {
			t.Errorf("%s: uid %q, %d panels", file, board.UID, len(board.Panels))
		}
		uids[board.UID] = true
		for i, p := range board.Panels {
			if p.ID != i+1 || p.Title == "" || p.Description == "" || p.GridPos.X+p.GridPos.W > 24 || len(p.Targets) == 0 {
				t.Errorf("%s: panel %+v", file, p)
			}
			for _, target := range p.Targets {
				expr := strings.NewReplacer("$__rate_interval", "5m", "$topic", "t").Replace(target.Expr)
				if _, err := parser.NewParser(parser.Options{}).ParseExpr(expr); err != nil || strings.Contains(expr, "$") {
					t.Errorf("%s: %s: %s: %v", file, p.Title, expr, err)
				}
			}
		}
	}
}
