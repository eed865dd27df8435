package console

import (
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/srtm-io/srtm/internal/testkit"
)

// gathered counts the collections of metrics.
type gathered struct {
	prometheus.Gatherer
	n int
}

func (g *gathered) Gather() ([]*dto.MetricFamily, error) {
	g.n++
	return g.Gatherer.Gather()
}

// The console charts a standalone broker's own metrics from the first look at the broker's page. It
// queries no metrics before, nor later than an hour after the last look.
func TestChartsOfABrokerByItself(t *testing.T) {
	reg := prometheus.NewRegistry()
	counter := func(name, label string) *prometheus.CounterVec {
		v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name}, []string{label})
		reg.MustRegister(v)
		return v
	}
	accepted, refused := counter("srtm_nsqd_topic_messages_accepted_total", "topic"), counter("srtm_nsqd_topic_messages_refused_total", "topic")
	released, delivered := counter("srtm_nsqd_topic_messages_released_total", "topic"), counter("srtm_nsqd_topic_messages_delivered_total", "topic")
	busy := counter(busyMetric, "loop")
	waiting := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "srtm_nsqd_topic_waiting_messages"}, []string{"topic"})
	latency := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "srtm_nsqd_topic_latency_seconds", Buckets: []float64{0.001, 0.01, 0.1, 10}}, []string{"topic", "part"})
	reg.MustRegister(waiting, latency)
	own := &gathered{Gatherer: reg}
	c, err := New(Config{Self: "x", Own: own, Log: slog.New(slog.DiscardHandler), Brokers: InProcess(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{}`)
	}))})
	testkit.Must(t, err)
	for n := range 2 * seldom {
		c.round(t.Context(), n)
	}
	testkit.Equal(t, own.n, 0, "times its metrics were gathered while no browser looks")
	page := httptest.NewRecorder()
	r := httptest.NewRequest(http.MethodGet, "http://localhost/ui/", nil)
	c.ServeHTTP(page, r)
	testkit.Equal(t, strings.Count(page.Body.String(), "data-chart="), 5, "%s", page.Body)
	if c.round(t.Context(), 1); own.n != 1 {
		t.Errorf("a page was loaded, and its metrics were gathered %d times", own.n)
	}

	now := time.Now().Add(time.Minute)
	look := func() { now = now.Add(2 * time.Second); c.sampleOwn(now) }
	for _, topic := range []string{"a", "b"} {
		accepted.WithLabelValues(topic).Add(1000)
		latency.WithLabelValues(topic, "delivery").Observe(5) // before the first look
	}
	busy.WithLabelValues("0").Add(10)
	look()
	for _, topic := range []string{"a", "b"} {
		accepted.WithLabelValues(topic).Add(100)
		refused.WithLabelValues(topic).Add(10)
		released.WithLabelValues(topic).Add(80)
		delivered.WithLabelValues(topic).Add(60)
		waiting.WithLabelValues(topic).Set(7)
		for i := range 100 {
			latency.WithLabelValues(topic, "delivery").Observe(map[bool]float64{true: 0.005, false: 20}[i < 99])
		}
		latency.WithLabelValues(topic, "access").Observe(0.0005)
	}
	busy.WithLabelValues("0").Add(1)
	look()
	rows := c.watched.rows(ownSeries, 0)
	if len(rows.Samples) != 1 || fmt.Sprint(rows.Brokers) != "[loop 0]" {
		t.Fatalf("%+v", rows)
	}
	// at, offered, released, delivered, refused, backlog, exceeded, access, broker, consumer, delivery, shares
	want := []float64{float64(now.UnixMilli()), 110, 80, 60, 10, 14, 0, 0.5, 0.99, 0.999, 0, 0, 0, 0, 0, 0, 1 + 9*50./99, 10, 9010, 0.5}
	for i, got := range rows.Samples[0] {
		if math.Abs(got-want[i]) > 1e-3*want[i] {
			t.Errorf("column %d is %v, want %v", i, got, want[i])
		}
	}
	accepted.DeleteLabelValues("a") // the topic is deleted
	look()
	accepted.WithLabelValues("b").Add(2)
	look()
	now = now.Add(time.Hour)
	look()
	rows = c.watched.rows(ownSeries, rows.Last)
	if len(rows.Samples) != 1 || rows.Samples[0][1] != 1 {
		t.Errorf("after a topic was deleted: %v", rows.Samples)
	}
}
