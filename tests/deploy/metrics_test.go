package deploy

import (
	"net/http"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/nsqio/go-nsq"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"

	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// named finds our metrics in an expression; a histogram has three names.
var named = regexp.MustCompile(`\bsrtm_[a-z0-9_]+`)

// scrape adds a daemon's exported metrics to into: a metric's type, by its name.
func scrape(t *testing.T, address string, into map[string]string) (text string) {
	t.Helper()
	text = localtest.MustAsk(t, http.MethodGet, "http://"+address+"/metrics", "")
	for line := range strings.Lines(text) {
		if f := strings.Fields(line); len(f) == 4 && f[1] == "TYPE" {
			into[f[2]] = f[3]
		}
	}
	return text
}

// Dashboards and alerts name only existing metrics. Exported metrics have the form that Prometheus
// wants: a help text, a unit, and "_total" for counters.
func TestMetricsExist(t *testing.T) {
	c := localtest.Start(t, 1, []string{"--fitting=off", "--report-interval=200ms", "--window=2s"}, "--mcap=20000")
	_, err := localtest.CreateTopic(t.Context(), localtest.Dial(t, c.RPC), &srtmv1.CreateTopicRequest{Spec: &srtmv1.TopicSpec{
		Name: "orders", Channels: []string{"c"}, Groups: []*srtmv1.PublisherGroup{{Key: "a", Count: 1, Rate: 10_000}},
		Contract: &srtmv1.Contract{RateMilli: 10_000_000, Burst: 1000, Slo: &srtmv1.Slo{Quantile: 0.5, Latency: durationpb.New(10 * time.Second)}},
	}})
	testkit.Must(t, err)
	b := c.Brokers[0]
	localtest.Consume(t, "orders", "c", nsq.HandlerFunc(func(*nsq.Message) error { return nil }), func(c *nsq.Config) { c.MaxInFlight = 100 }, b.TCP)
	producer := localtest.Producer(t, b.TCP, "a.0")
	exported := map[string]string{}
	testkit.WaitFor(t, "a verdict on the SLO and on publishers", func() bool {
		bodies := make([][]byte, 100)
		for i := range bodies {
			bodies[i] = []byte("x")
		}
		testkit.Must(t, producer.MultiPublish("orders", bodies))
		text := scrape(t, c.Web, exported)
		return strings.Contains(text, "\nsrtm_topic_slo_met{") && strings.Contains(text, "\nsrtm_topic_publishers_without_broker{") // checked once a period
	})
	texts := []string{scrape(t, c.Web, exported), scrape(t, b.HTTP, exported)}

	files, _ := filepath.Glob(filepath.Join(top, "deploy", "grafana", "*.json"))
	for _, file := range append(files, filepath.Join(top, "deploy", "prometheus", "alerts.yaml")) {
		found := named.FindAllString(read(t, file), -1)
		if len(found) < 10 {
			t.Errorf("%s names only %q", file, found)
		}
		for _, name := range found {
			if _, is := rare[name]; is {
				continue
			}
			if exported[name] == "" && exported[strings.TrimSuffix(name, "_bucket")] != "histogram" {
				t.Errorf("%s: no daemon exports %s", file, name)
			}
		}
		for _, one := range regexp.MustCompile(`- alert:|"expr":`).Split(read(t, file), -1)[1:] {
			if label := foreign(one, texts); label != "" {
				t.Errorf("%s: no metric has the label %s in\n%s", file, label, one)
			}
		}
	}

	// A daemon of each other kind.
	ports := localtest.Ports(t, 7)
	localtest.Run(t, localtest.Program(t, "tbadaptor"), ports[1]+"/healthz", "--grpc-address="+ports[0], "--http-address="+ports[1])
	localtest.Run(t, localtest.Program(t, "admission"), ports[3]+"/healthz", "--grpc-address="+ports[2], "--http-address="+ports[3], "--udp-address="+ports[4], "--data-path="+t.TempDir())
	policy := filepath.Join(t.TempDir(), "policy.toml")
	write(t, policy, read(t, filepath.Join(top, "deploy", "conf", "gateway-policy.toml")))
	localtest.Run(t, localtest.Program(t, "gateway"), ports[6]+"/healthz", "--http-address="+ports[5], "--admin-address="+ports[6], "--policy="+policy)
	texts = append(texts, scrape(t, ports[1], exported), scrape(t, ports[3], exported), scrape(t, ports[6], exported))
	for _, text := range texts { // by Prometheus' own parser and rules
		problems, err := promlint.New(strings.NewReader(text)).Lint()
		testkit.NoError(t, err)
		for _, p := range problems {
			if strings.HasPrefix(p.Metric, "srtm_") {
				t.Errorf("%s: %s", p.Metric, p.Text)
			}
		}
	}
	for name, kind := range exported {
		if !strings.HasPrefix(name, "srtm_") {
			continue
		}
		if (kind == "counter") != strings.HasSuffix(name, "_total") {
			t.Errorf("%s is a %s", name, kind)
		}
		if kind == "histogram" && !strings.HasSuffix(name, "_seconds") && !strings.HasSuffix(name, "_bytes") {
			t.Errorf("the histogram %s has no unit", name)
		}
		for _, unit := range []string{"_ms", "_us", "_ns", "_milliseconds", "_microseconds", "_nanoseconds", "_kb", "_mb"} {
			if strings.HasSuffix(strings.TrimSuffix(name, "_total"), unit) {
				t.Errorf("%s is in no base unit", name)
			}
		}
		help := false
		for _, text := range texts {
			help = help || strings.Contains(text, "# HELP "+name+" ")
		}
		if !help {
			t.Errorf("%s has no help", name)
		}
	}
	// The number of clients, messages and peer addresses is unbounded.
	label := regexp.MustCompile(`[{,]([a-z_]+)="`)
	known := map[string]bool{}
	for _, name := range labels {
		known[name] = true
	}
	for _, text := range texts {
		for line := range strings.Lines(text) {
			if !strings.HasPrefix(line, "srtm_") {
				continue
			}
			for _, l := range label.FindAllStringSubmatch(line, -1) {
				if !known[l[1]] {
					t.Errorf("a label whose number of values is not bounded: %s", line)
					known[l[1]] = true
				}
			}
		}
	}
}

// Places where an expression, its description, and a sample name labels.
var (
	grouped  = regexp.MustCompile(`\b(?:by|on|without) \(([^)]*)\)`)
	selected = regexp.MustCompile(`([a-z_]+)(?:=|!=|=~|!~)\\?"`)
	said     = regexp.MustCompile(`{{\s*(?:\$labels\.)?([a-z_]+)\s*}}`)
	sample   = regexp.MustCompile(`(?m)^(srtm_[a-z0-9_]+){(.*)}`)
)

// foreign returns a label that an alert or a panel names, but that neither its metrics nor Prometheus
// have; "": there is none. The labels of a metric without a sample are unknown.
func foreign(one string, texts []string) string {
	has := map[string]bool{"instance": true, "job": true}
	for _, name := range named.FindAllString(one, -1) {
		seen := false
		for _, text := range texts {
			seen = seen || strings.Contains(text, "\n"+name+"{") || strings.Contains(text, "\n"+name+" ")
			for _, s := range sample.FindAllStringSubmatch(text, -1) {
				for _, l := range selected.FindAllStringSubmatch(s[2], -1) {
					has[l[1]] = has[l[1]] || s[1] == name
				}
			}
		}
		if !seen {
			return ""
		}
	}
	var names []string
	for _, list := range grouped.FindAllStringSubmatch(one, -1) {
		names = append(names, strings.Split(list[1], ", ")...)
	}
	for _, name := range append(selected.FindAllStringSubmatch(one, -1), said.FindAllStringSubmatch(one, -1)...) {
		names = append(names, name[1])
	}
	for _, name := range names {
		if !has[name] {
			return name
		}
	}
	return ""
}

// rare are metrics that are exported only under a condition.
var rare = map[string]string{
	"srtm_tbadaptor_share_idle_rate":                "while a share is reserved for a broker whose lease is over",
	"srtm_tls_certificate_expiry_timestamp_seconds": "with TLS",
}

// labels are the labels with bounded values: bounded by what operators create and configure, or by the
// program.
var labels = []string{
	"topic", "channel", "part", "broker", "class", "resource", "server", // operators
	"le", "result", "outcome", "state", "session", "source", "cause", "kind", "reason", "verdict", "of", "loop", // the program
	"version", "commit", "go_version",
}
