package reports

import (
	"errors"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
)

const (
	interval = time.Second
	window   = 5 * time.Second
)

// session is a Broker with its reports in sequence.
type session struct {
	*Broker
	now time.Time
}

func newSession() *session { return &session{NewBroker(interval, window), time.Now()} }

func (s *session) report(changes bool, topics ...*srtmv1.TopicStats) error {
	s.now = s.now.Add(interval)
	_, err := s.Apply(&srtmv1.BrokerReport{Topics: topics, Changes: changes}, s.now, func(string) bool { return true })
	return err
}

func stats(offered uint64) *srtmv1.TopicStats {
	return &srtmv1.TopicStats{Topic: "t", Interval: durationpb.New(interval), Offered: offered}
}

func TestAReportLeavesOutNoMessages(t *testing.T) {
	s := newSession()
	if err := s.report(false, stats(1)); err != nil {
		t.Fatal(err)
	}
	if fault, ok := errors.AsType[*Fault](s.report(true)); !ok || fault.Field != "report.changes" {
		t.Errorf("left out after a message: %v", fault)
	}
}

// A topic that was removed here meanwhile need not be reported any more.
func TestAReportMayLeaveOutWhatWasRemoved(t *testing.T) {
	s := newSession()
	if err := s.report(false, stats(1)); err != nil {
		t.Fatal(err)
	}
	s.Forget("t")
	if err := s.report(true); err != nil || len(s.active) > 0 {
		t.Errorf("%v; %d topics are still looked at", err, len(s.active))
	}
}

func TestATopicThatIsStillForAWindowKeepsNoReports(t *testing.T) {
	s := newSession()
	for _, offered := range []uint64{1, 0} {
		if err := s.report(false, stats(offered)); err != nil {
			t.Fatal(err)
		}
	}
	still := s.now
	is := s.Topic("t")
	for s.now.Sub(still) <= window {
		if err := s.report(true); err != nil {
			t.Fatal(err)
		}
		if got := is.Within(s.now); len(got) != 1 || got[0].Stats != is.last {
			t.Fatalf("%v later: %d reports of the last interval, want what was said last", s.now.Sub(still), len(got))
		}
	}
	if len(is.reports) > 0 || len(s.active) > 0 {
		t.Errorf("%v later it keeps %d reports, and %d topics are looked at", s.now.Sub(still), len(is.reports), len(s.active))
	}
}
