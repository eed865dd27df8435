package report_test

import (
	"bytes"
	"encoding/json"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tools/iotpub/report"
	"github.com/srtm-io/srtm/tools/iotpub/verify"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func quantiles(base time.Duration) report.Quantiles {
	l := histogram.NewLatency()
	for i := range 1000 {
		l.Record(base * time.Duration(i+1) / 100)
	}
	return report.QuantilesOf(l)
}

func full() *report.Report {
	late := quantiles(20 * time.Millisecond)
	return &report.Report{
		Type: report.TypeReport, Version: "SRTM x", Topic: "sensors", Seed: 7, Load: "3 publishers", Publishers: 3, Protocol: "mqtt",
		Planned: 10, Seconds: 4.5, Interrupted: true,
		Counts: report.Counts{
			Offered: 1000, Sent: 990, Accepted: 900, Refused: map[string]uint64{"E_RATE_LIMITED": 50, "E_QUEUE_FULL": 30, "E_BAD_TOPIC": 30},
			Unanswered: 5, Skipped: 10, Delivered: 899, Duplicated: 2,
		},
		OfferedRate: 222.2, AchievedRate: 200, Lost: 1, Moved: 2, Strange: 3, LastError: "127.0.0.1:1: read: reset",
		Lateness: quantiles(time.Microsecond), Answer: quantiles(time.Millisecond), EndToEnd: &late,
		Account: &verify.Result{Accepted: 900, Delivered: 899, Lost: 3, Duplicated: 2, Unaccepted: 2, Foreign: 1},
		Missing: []verify.Message{{Source: 1, Seq: 2}}, CPUSeconds: 1.25,
		Background: &report.Background{
			Topic: "background", Publishers: 40, Counts: report.Counts{Offered: 400, Sent: 400, Accepted: 399, Refused: map[string]uint64{"E_QUEUE_FULL": 1}},
			OfferedRate: 88.9, AcceptedRate: 88.7, Lateness: quantiles(time.Microsecond), EndToEnd: quantiles(2 * time.Millisecond),
		},
	}
}

func clean() *report.Report {
	late := quantiles(time.Millisecond)
	return &report.Report{
		Type: report.TypeReport, Topic: "t", Load: "a load", Publishers: 1, Planned: 1, Seconds: 1,
		Counts: report.Counts{Offered: 10, Sent: 10, Accepted: 10, Delivered: 10}, OfferedRate: 10, AchievedRate: 10,
		EndToEnd: &late, Account: &verify.Result{Accepted: 10, Delivered: 10},
	}
}

func TestText(t *testing.T) {
	for name, r := range map[string]*report.Report{"full": full(), "clean": clean()} {
		var b bytes.Buffer
		testkit.Must(t, r.WriteText(&b))
		testkit.Golden(t, "testdata/"+name+".txt", b.Bytes())
	}
	p := &report.Progress{ElapsedSeconds: 12.34, OfferedRate: 10000.4, Connected: 3, Lateness: quantiles(time.Second)}
	var b bytes.Buffer
	testkit.Must(t, p.WriteText(&b))
	testkit.Golden(t, "testdata/progress.txt", b.Bytes())
}

// The JSON is read by other programs: its names are part of the interface.
func TestJSON(t *testing.T) {
	text := testkit.Result(json.MarshalIndent(full(), "", "  ")).Must(t)
	testkit.Golden(t, "testdata/full.json", append(text, '\n'))
	var back report.Report
	testkit.Must(t, json.Unmarshal(text, &back))
	again, err := json.MarshalIndent(back, "", "  ")
	if err != nil || !bytes.Equal(again, text) {
		t.Errorf("read back it is %s, %v", again, err)
	}
}

func TestFault(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*report.Report)
		want   string
	}{
		"clean":           {func(*report.Report) {}, ""},
		"lost":            {func(r *report.Report) { r.Account.Lost = 3 }, "lost 3 accepted messages"},
		"duplicated":      {func(r *report.Report) { r.Account.Duplicated = 1 }, "1 message delivered more than once"},
		"both":            {func(r *report.Report) { r.Account.Lost, r.Account.Duplicated = 1, 1 }, "lost 1 accepted message; 1 message delivered more than once"},
		"unaccepted only": {func(r *report.Report) { r.Account.Unaccepted = 4 }, ""},
		"nothing offered": {func(r *report.Report) { r.Offered, r.Accepted = 0, 0 }, ""},
		"nothing taken":   {func(r *report.Report) { r.Accepted = 0 }, "no message was accepted"},
		"no subscriber":   {func(r *report.Report) { r.Account = nil }, ""},
	} {
		r := clean()
		c.change(r)
		testkit.Equal(t, r.Fault(), c.want, "%s", name)
	}
}

func TestAchievedFraction(t *testing.T) {
	for _, c := range []struct{ offered, achieved, want float64 }{{0, 0, 1}, {100, 100, 1}, {100, 25, 0.25}} {
		r := report.Report{OfferedRate: c.offered, AchievedRate: c.achieved}
		testkit.Equal(t, r.AchievedFraction(), c.want, "%v of %v", c.achieved, c.offered)
	}
}

func TestMicros(t *testing.T) {
	for us, want := range map[int64]string{
		0: "0s", 7: "7µs", 999: "999µs", 1234: "1.23ms", 12345: "12.3ms", 123456: "123ms", 1_234_567: "1.235s", 12_345_678: "12.3s",
	} {
		testkit.Equal(t, report.Micros(us), want, "%d us", us)
	}
}
