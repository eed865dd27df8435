package history

import (
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// The history keeps an hour of seconds, of a bounded number of brokers, and no more.
func TestSeriesIsBounded(t *testing.T) {
	var s Series
	if s.Brokers() == nil {
		t.Error("no brokers are null")
	}
	most := 0
	for i := range 3 * MaxSamples {
		s.Add(Sample{At: int64(i+1) * 1000, Offered: float32(i)}, map[string]float32{"a": 1, "b": float32(i)})
		s.Note(Event{At: int64(i), Text: "happened"})
		most = max(most, s.Bytes())
	}
	all := s.Since(0)
	if len(all) != MaxSamples || len(s.Events()) != MaxEvents || s.Events()[0].At != int64(3*MaxSamples-1) {
		t.Errorf("%d samples, %d events", len(all), len(s.Events()))
	}
	if most > 600_000 {
		t.Errorf("it takes %d bytes", most)
	}
	if last, ok := s.Last(); !ok || last.Offered != float32(3*MaxSamples-1) || last.Shares[1] != last.Offered {
		t.Errorf("%+v", last)
	}
	testkit.Equal(t, len(s.Since(all[len(all)-3].At)), 2, "samples since the last but two")
	s.Add(Sample{At: 5}, nil)
	if last, _ := s.Last(); last.At == 5 {
		t.Error("a sample of the past was taken")
	}
	// Samples older than an hour are removed, however few there are.
	s.Add(Sample{At: all[len(all)-1].At + Span.Milliseconds() + 1}, nil)
	testkit.Equal(t, len(s.Since(0)), 1, "samples after an hour of silence")
}

// A broker that joins later has no share before. Names beyond the bound are left out.
func TestSharesOfBrokers(t *testing.T) {
	var s Series
	s.Add(Sample{At: 1}, map[string]float32{"b": 2})
	s.Add(Sample{At: 2}, map[string]float32{"a": 1})
	many := map[string]float32{}
	for i := range 2 * maxBrokers {
		many[string(rune('A'+i%26))+string(rune('a'+i/26))] = 1
	}
	s.Add(Sample{At: 3}, many)
	all := s.Since(0)
	if got := s.Brokers(); got[0] != "b" || got[1] != "a" || len(got) != maxBrokers {
		t.Errorf("brokers %v", got)
	}
	if len(all[0].Shares) != 1 || all[1].Shares[0] != 0 || all[1].Shares[1] != 1 || len(all[2].Shares) != maxBrokers {
		t.Errorf("%v", all)
	}
}
