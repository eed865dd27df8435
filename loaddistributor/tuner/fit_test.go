package tuner

import (
	"reflect"
	"testing"
	"time"

	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// The topic does not keep the captured trace, and the tuner does not request it any more.
func TestAFitThatIsOverKeepsHowItEnded(t *testing.T) {
	now := time.Unix(1e9, 0)
	tuner := NewTuner(Config{Mode: ModeFast, Report: time.Second})
	tuner.Begin("t", placement.Demand{Groups: []placement.Group{{Count: 3, Rate: 1}}}, now)
	f := tuner.fits["t"]
	f.search, f.start, f.record = &Fast{}, now, newRecording(Topic{}, now)
	f.record.requested["session"] = now
	f.measureFrom(1, now)
	tuner.end("t", f, OutcomeKept, "well", now.Add(time.Second))
	if f.search != nil || f.record != nil || f.next != nil || f.sum.parts != nil || f.counted != nil {
		t.Errorf("it keeps %+v", f)
	}
	want := []Effect{Ended{"t", OutcomeKept, time.Second, false}, Capture{"session", "t", 0}, Recorded{}}
	if got := tuner.flush(); !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	if s := tuner.Status("t", now); !s.Ended || s.Running || s.Duration != time.Second || s.Step != "well" {
		t.Errorf("%+v", s)
	}
}
