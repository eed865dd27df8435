package testkit

import (
	"strings"
	"sync"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
)

// WaitFor polls until there returns true, and fails t after Hang.
func WaitFor(t testing.TB, what string, condition func() bool) {
	t.Helper()
	WaitUntil(t, func() string {
		if condition() {
			return ""
		}
		return what
	})
}

// WaitUntil polls until objection returns "", and fails t with an objection that stays.
func WaitUntil(t testing.TB, objection func() string) {
	t.Helper()
	ticker := time.NewTicker(time.Millisecond)
	defer ticker.Stop()
	for end := time.Now().Add(Hang); ; <-ticker.C {
		last := objection()
		if last == "" {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", Hang, last)
		}
	}
}

// Buffer is a text buffer for several goroutines, such as a log.
type Buffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (b *Buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *Buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// Metric returns the sum of a counter's or gauge's series whose labels have all the
// values. It fails t without such a series.
func Metric(t reporter, from interface {
	Gather() ([]*dto.MetricFamily, error)
}, name string, labels ...string) (sum float64) {
	t.Helper()
	families, err := from.Gather()
	if err != nil {
		t.Fatalf("metrics: %v", err)
	}
	found := false
	for _, f := range families {
		for _, m := range f.Metric {
			if f.GetName() == name && labelled(m, labels) {
				sum, found = sum+m.GetGauge().GetValue()+m.GetCounter().GetValue(), true
			}
		}
	}
	if !found {
		t.Fatalf("no metric %s%q", name, labels)
	}
	return sum
}

func labelled(m *dto.Metric, values []string) bool {
	for _, v := range values {
		found := false
		for _, l := range m.Label {
			found = found || l.GetValue() == v
		}
		if !found {
			return false
		}
	}
	return true
}
