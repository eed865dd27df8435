package main

import (
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"testing"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
	"github.com/srtm-io/srtm/tools/srtm/calibrate"
)

// In a cluster no client creates the topic. The loaddistributor creates the topic only on the broker, whatever rate is
// allocated there, and deletes the topic. The cluster's brokers require TLS, over HTTP too.
func TestCalibrateInACluster(t *testing.T) {
	authority := testkit.NewAuthority(t)
	certificate := authority.Certificate("broker")
	c := realCluster(t, 300, "--tls-required=true", "--tls-cert="+certificate.CertFile, "--tls-key="+certificate.KeyFile, "--https-address=127.0.0.1:0")
	run := func(args ...string) (stdout string, err error) {
		t.Helper()
		stdout, _, err = srtm(t, c.GRPC, args...)
		return stdout, err
	}
	calibrate := func(args ...string) (stdout string, err error) {
		t.Helper()
		return run(append([]string{
			"broker", "calibrate", "--first=400", "--least=100", "--most=400", "--slo-quantile=0.9", "--slo-latency=10s",
			"--settle=100ms", "--step=600ms", "--connections=5",
		}, args...)...)
	}
	if out, err := calibrate("broker1"); err == nil || !strings.Contains(err.Error(), "--nsqd-tls-ca") {
		t.Errorf("in clear: %v\n%s", err, out)
	}
	trust := "--nsqd-tls-ca=" + authority.File
	mcap := func() string {
		t.Helper()
		out, err := run("broker", "list", "--output=json")
		var all []struct {
			Allocated string
			Mcap      string `json:"calibrated_mcap"`
			Topics    []string
		}
		if err != nil || json.Unmarshal([]byte(out), &all) != nil || len(all) != 1 {
			t.Fatalf("%v\n%s", err, out)
		}
		return strings.Join(append(all[0].Topics, all[0].Allocated, all[0].Mcap), " ")
	}
	out, err := calibrate("broker1", "--apply", trust)
	if err != nil || !strings.Contains(out, "broker broker1, p90 within 10s: mcap at least 400 msg/s") || mcap() != "0 400" {
		t.Errorf("%v, %s\n%s", err, mcap(), out)
	}

	if out, err := run("topic", "create", "theirs", "--rate=400", "--burst=1"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if out, err := calibrate("broker1", trust); err == nil || !strings.Contains(err.Error(), "carries theirs; --force measures all the same") {
		t.Errorf("%v\n%s", err, out)
	}
	if out, err := calibrate("broker1", "--force", trust); err != nil || mcap() != "theirs 400 400" {
		t.Errorf("%v, %s\n%s", err, mcap(), out)
	}
}

// The command measures a real broker, which a loaddistributor knows by its id, and applies the result. Any machine can
// carry the tried rates.
func TestCalibrate(t *testing.T) {
	d := localtest.NSQD(t, "", "--broker-id=b1", "--max-msg-size=500")
	a := &admin{brokers: []*srtmv1.Broker{
		{Id: "b1", TcpAddress: d.TCP, HttpAddress: d.HTTP, Connected: true}, {Id: "b2", TcpAddress: d.TCP, HttpAddress: d.HTTP},
	}}
	a.delete = func(topic string) { post(t, "http://"+d.HTTP+"/topic/delete?topic="+topic) }
	address := serve(t, a)
	run := func(args ...string) (stdout, stderr string, err error) {
		t.Helper()
		return srtm(t, address, append([]string{
			"broker", "calibrate", "--first=200", "--least=100", "--most=400", "--slo-quantile=0.9", "--slo-latency=10s",
			"--settle=100ms", "--step=600ms", "--connections=5",
		}, args...)...)
	}

	out, progress, err := run("b1", "--apply", "--output=json")
	var found struct {
		Broker    string
		Mcap      int64
		Limit     calibrate.Limit
		Applied   bool
		Note      string
		LatencyUs int64   `json:"slo_latency_us"`
		Quantile  float64 `json:"slo_quantile"`
		Steps     []struct {
			Rate      int64
			Outcome   string
			Delivered int64
			DelayUs   int64 `json:"delay_us"`
		}
	}
	if err != nil || json.Unmarshal([]byte(out), &found) != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if found.Broker != "b1" || found.Mcap != 400 || found.Limit != calibrate.LimitMost || !found.Applied || found.Note == "" ||
		found.LatencyUs != 10_000_000 || found.Quantile != 0.9 || len(found.Steps) < 3 {
		t.Fatalf("%s", out)
	}
	if last := found.Steps[len(found.Steps)-1]; last.Rate != 400 || last.Outcome != "kept" || last.Delivered < 100 || last.DelayUs < 1 {
		t.Errorf("%+v", last)
	}
	if a.set.GetBrokerId() != "b1" || a.set.GetMcap() != 400 {
		t.Errorf("set %v", a.set)
	}
	if !strings.Contains(progress, "200 msg/s: kept\n") || !strings.Contains(progress, "400 msg/s: kept\n") {
		t.Errorf("progress %q", progress)
	}

	a.set = nil
	out, _, err = run("--nsqd-tcp-address="+d.TCP, "--nsqd-http-address="+d.HTTP, "--first=400")
	if err != nil || a.set != nil || !strings.Contains(out, "p90 within 10s: mcap at least 400 msg/s: more was not to be tried") || strings.Contains(out, "applied") {
		t.Errorf("set %v, %v\n%s", a.set, err, out)
	}
	// A broker given by its addresses is applied under the id that the broker reports.
	out, _, err = run("--nsqd-tcp-address="+d.TCP, "--nsqd-http-address="+d.HTTP, "--first=400", "--apply")
	if err != nil || a.set.GetBrokerId() != "b1" || a.set.GetMcap() != 400 || !strings.Contains(out, "broker b1") || !strings.Contains(out, "places by it") {
		t.Errorf("set %v, %v\n%s", a.set, err, out)
	}

	// The command does not apply the result of a broker that keeps no rate.
	a.set = nil
	out, _, err = run("b1", "--size=1000", "--first=100", "--apply")
	if !errors.Is(err, calibrate.ErrNothingKept) || a.set != nil || !strings.Contains(out, "not applied") || !strings.Contains(out, "lost ") {
		t.Errorf("set %v, %v\n%s", a.set, err, out)
	}

	testkit.Equal(t, a.created.GetMeasuredBrokerId(), "b1", "created %v", a.created)
	post(t, "http://"+d.HTTP+"/topic/create?topic=theirs")
	for want, args := range map[string][]string{
		"carries theirs; --force measures all the same": {"b1"},
		"broker b2 is gone":                             {"b2"},
		`knows no broker "b3"`:                          {"b3"},
	} {
		if out, _, err := run(args...); err == nil || !strings.Contains(err.Error(), want) || out != "" {
			t.Errorf("%v: %v, want %q\n%s", args, err, want, out)
		}
	}
	for _, args := range [][]string{
		{"b1", "b2"}, {}, {"b1", "--nsqd-tcp-address=h:1"}, {"b1", "--slo-latency=0s"}, {"b1", "--tolerance=0"}, {"b1", "--output=yaml"},
	} {
		if _, _, err := run(args...); !errors.As(err, new(program.UsageError)) {
			t.Errorf("%v: %v", args, err)
		}
	}
	if a.set != nil {
		t.Errorf("set %v", a.set)
	}
}

func post(t *testing.T, url string) {
	t.Helper()
	res, err := http.Post(url, "", nil)
	if err != nil {
		t.Error(err)
		return
	}
	res.Body.Close()
}
