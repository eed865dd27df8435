package main

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/testkit"
)

func TestDoctor(t *testing.T) {
	late := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Date", time.Now().Add(-time.Minute).UTC().Format(http.TimeFormat))
		w.WriteHeader(http.StatusInternalServerError)
	}))
	defer late.Close()
	good := httptest.NewServer(http.NotFoundHandler())
	good.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {})
	defer good.Close()
	host := func(s *httptest.Server) string { return strings.TrimPrefix(s.URL, "http://") }
	address := serve(t, &admin{brokers: []*srtmv1.Broker{
		{Id: "b1", Connected: true, TcpAddress: host(good), HttpAddress: host(good)},
		{Id: "b2", TcpAddress: "127.0.0.1:1", HttpAddress: host(late)},
	}})
	dir := t.TempDir()
	none := filepath.Join(dir, "none.pem")
	testkit.Must(t, os.WriteFile(none, []byte("nothing"), 0o600))
	out, _, err := srtm(t, address, "doctor", "--output=json", "--data-path="+dir, "--data-path="+dir+"/missing", "--cert="+none, "--cert="+dir+"/missing")
	var exit program.ExitError
	if !errors.As(err, &exit) || exit.Code != 1 || exit.Err != nil {
		t.Errorf("it ends with %v", err)
	}
	var all []finding
	testkit.Must(t, json.Unmarshal([]byte(out), &all))
	got := map[string]string{}
	for _, f := range all {
		got[f.Check] = f.State
		if (f.State == failed || f.State == warned) == (f.Do == "") || f.Found == "" {
			t.Errorf("%+v", f)
		}
	}
	want := map[string]string{
		"loaddistributor " + address: stateOK, "broker b1 HTTP": stateOK, "broker b1 clock": stateOK,
		"broker b2": failed, "broker b2 HTTP": failed, "broker b2 clock": warned,
		"certificate " + none: failed, "certificate " + dir + "/missing": failed,
	}
	if runtime.GOOS == "linux" {
		want["space of "+dir+"/missing"] = failed
		for _, check := range []string{"kernel", "arrival stamps", "clock", "open files of this shell", "port 1883 (nsqd, MQTT)", "port 4150 (nsqd, NSQ)", "port 4191 (admission, HTTP)", "space of " + dir} {
			if got[check] == "" {
				t.Errorf("%s is not checked:\n%s", check, out)
			}
		}
	}
	for check, state := range want {
		testkit.Equal(t, got[check], state, "%s:\n%s", check, out)
	}

	if out, _, err = srtm(t, "127.0.0.1:1", "doctor"); err == nil || !strings.Contains(out, "start it, or name another") {
		t.Errorf("%v\n%s", err, out)
	}
	for left, want := range map[time.Duration]string{0: failed, time.Hour: warned, certificateDue: stateOK} {
		testkit.Equal(t, judge(left), want, "a certificate with %v left", left)
	}
}

// A Date header is rounded down to seconds, and an answer takes time.
func TestDoctorsClock(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for _, c := range []struct {
		before, after time.Duration // from the Date
		want          string
	}{
		{0, 0, stateOK}, {900 * time.Millisecond, 950 * time.Millisecond, stateOK}, {-3 * time.Second, 3 * time.Second, stateOK},
		{1900 * time.Millisecond, 2 * time.Second, stateOK}, {2100 * time.Millisecond, 3 * time.Second, warned},
		{-5 * time.Second, -900 * time.Millisecond, stateOK}, {-5 * time.Second, -1100 * time.Millisecond, warned},
	} {
		var d doctor
		d.clock("c", at, at.Add(c.before), at.Add(c.after))
		testkit.Equal(t, d.findings[0].State, c.want, "asked %v to %v after the Date", c.before, c.after)
	}
}

// The doctor names the fault of a rules file, as nsqd does.
func TestDoctorChecksMQTTRules(t *testing.T) {
	file := filepath.Join(t.TempDir(), "rules.toml")
	for _, c := range []struct{ text, state, found string }{
		{"[[mqtt]]\nfilter = \"fleet/+/telemetry\"\ntopic = \"telemetry\"\n", stateOK, "no faults"},
		{"[[mqtt]]\nfilter = \"fleet/#/telemetry\"\ntopic = \"telemetry\"\n", failed, "fleet/#/telemetry"},
	} {
		testkit.Must(t, os.WriteFile(file, []byte(c.text), 0o600))
		var d doctor
		d.mqttRules(file)
		if f := d.findings[0]; f.State != c.state || !strings.Contains(f.Found, c.found) {
			t.Errorf("%s: %+v", c.text, f)
		}
	}
	var d doctor
	d.mqttRules(file + ".missing")
	testkit.Equal(t, d.findings[0].State, failed)
}

// The doctor checks the certificates in files and of a server.
func TestDoctorLooksAtCertificates(t *testing.T) {
	var d doctor
	d.certificate(testkit.NewAuthority(t).File)
	if f := d.findings[0]; len(d.findings) != 1 || f.State != warned || !strings.Contains(f.Found, "expires") {
		t.Errorf("%+v", d.findings)
	}
	s := httptest.NewUnstartedServer(http.NotFoundHandler())
	s.EnableHTTP2 = true
	s.StartTLS()
	defer s.Close()
	d = doctor{}
	d.checkExpiry(t.Context(), s.Listener.Addr().String())
	if f := d.findings[0]; len(d.findings) != 1 || f.State != stateOK {
		t.Errorf("%+v", d.findings)
	}
}
