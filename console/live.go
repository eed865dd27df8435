package console

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/srtm-io/srtm/console/history"
)

// slowReader is the maximum time for a stream's reader to accept an event.
const slowReader = 5 * time.Second

// streamTime is the lifetime of a stream. Afterwards the reader must authenticate again.
const streamTime = 10 * time.Minute

// Bounds that a stream may reach.
const (
	boundAll    = "all"
	boundCaller = "caller"
)

// streams counts the open streams.
type streams struct {
	maxStreams int // set by New
	mu         sync.Mutex
	total      int            // guarded by mu
	byCaller   map[string]int // guarded by mu; by caller, without zero counts
}

// begin counts a new stream of a caller, or returns the exceeded bound.
func (s *streams) begin(caller string) (bound string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.total >= s.maxStreams:
		return boundAll
	case s.byCaller[caller] >= max(1, s.maxStreams/2):
		return boundCaller
	}
	s.total++
	s.byCaller[caller]++
	return ""
}

func (s *streams) end(caller string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.total--
	if s.byCaller[caller]--; s.byCaller[caller] == 0 {
		delete(s.byCaller, caller)
	}
}

// open returns the number of open streams.
func (s *streams) open() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.total
}

// stream sends updates of a page as server-sent events: "live" with changed HTML, and
// "samples" for charts. It drops readers that are too slow. Beyond the bounds it answers
// that readers must retry later.
func (c *Console) stream(show viewer) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		u := userOf(r.Context())
		caller := u.caller()
		if bound := c.streams.begin(caller); bound != "" {
			c.refused.WithLabelValues(bound).Inc()
			w.Header().Set("Retry-After", "10")
			http.Error(w, "too many pages are being kept up to date", http.StatusServiceUnavailable)
			return
		}
		defer c.streams.end(caller)
		w.Header().Set("Content-Type", "text/event-stream")
		controller := http.NewResponseController(w)
		since := map[string]int64{}
		if start, err := strconv.ParseInt(r.URL.Query().Get("since"), 10, 64); err == nil {
			since[""] = start
		}
		last := template.HTML("")
		idle := time.NewTicker(15 * time.Second) // detects readers that have left, and keeps proxies from closing the stream
		defer idle.Stop()
		timer := time.NewTimer(streamTime)
		defer timer.Stop()
		for silent := false; ; {
			changed := c.watched.changes()
			var b bytes.Buffer
			v, err := show(r.Context(), r.URL.Query(), u)
			f := frame{view: v, User: u, Path: strings.TrimPrefix(r.URL.RequestURI(), "/ui/live"), Cluster: c.cfg.API != nil}
			var live template.HTML
			if err == nil {
				live, err = c.render(v.Template+"-live", f)
			}
			if err != nil {
				live, _ = c.render("trouble", frame{view: view{Data: problemOf(err).text}}) // a template of one line
			}
			if live != last {
				event(&b, "live", string(below(prefixOf(r), live)))
				last = live
			}
			for _, topic := range v.Topics {
				if _, seen := since[topic]; !seen {
					since[topic] = since[""]
				}
				rows := c.watched.rows(topic, since[topic])
				if len(rows.Samples) == 0 {
					continue
				}
				since[topic] = rows.Last
				text, err := json.Marshal(rows)
				if err == nil {
					event(&b, "samples", string(text))
				}
			}
			if silent && b.Len() == 0 {
				b.WriteString(": still here\n\n")
			}
			_ = controller.SetWriteDeadline(time.Now().Add(slowReader)) // if the deadline cannot be set, the server's own deadline holds
			_, err = w.Write(b.Bytes())
			if err == nil {
				err = controller.Flush()
			}
			if err != nil {
				if errors.Is(err, os.ErrDeadlineExceeded) {
					c.dropped.Inc()
				}
				return
			}
			select {
			case <-changed:
				silent = false
			case <-idle.C:
				silent = true
			case <-timer.C:
				return
			case <-r.Context().Done():
				return
			case <-c.done:
				return
			}
		}
	}
}

// event writes one event. A line break in its text starts another line of data.
func event(b *bytes.Buffer, name, text string) {
	fmt.Fprintf(b, "event: %s\n", name)
	for line := range strings.Lines(strings.ReplaceAll(text, "\r", "")) {
		b.WriteString("data: " + strings.TrimSuffix(line, "\n") + "\n")
	}
	b.WriteByte('\n')
}

// rows are samples of a topic in the form for scripts.
type rows struct {
	Topic   string   `json:"topic"`
	Brokers []string `json:"brokers"`
	Last    int64    `json:"last"`
	SLO     float64  `json:"slo"` // ms
	// Each sample is [at, offered, released, delivered, refused, backlog, exceeded, then
	// p50, p99 and p99.9 of access, broker, consumer and delivery in ms, then the shares].
	Samples [][]float64 `json:"samples"`
}

func rowsOf(topic string, s *history.Series, since int64) rows {
	r := rows{Topic: topic, Brokers: s.Brokers(), Samples: [][]float64{}}
	for _, sample := range s.Since(since) {
		row := []float64{
			float64(sample.At), float64(sample.Offered), float64(sample.Released), float64(sample.Delivered),
			float64(sample.Refused), float64(sample.Backlog), float64(sample.Exceeded),
		}
		for _, d := range sample.Delays {
			row = append(row, float64(d.P50), float64(d.P99), float64(d.P999))
		}
		for _, share := range sample.Shares {
			row = append(row, float64(share))
		}
		r.Samples = append(r.Samples, row)
		r.Last = sample.At
	}
	return r
}

// samples serves the samples of a topic's last hour.
func (c *Console) samples(w http.ResponseWriter, r *http.Request) {
	since, _ := strconv.ParseInt(r.URL.Query().Get("since"), 10, 64) // else everything
	text, err := json.Marshal(c.watched.rows(r.URL.Query().Get("topic"), since))
	if err != nil {
		c.fail(w, r, err)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(text) // the reader has left
}
