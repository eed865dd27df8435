package main

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestGatewayStatus(t *testing.T) {
	const status = `{"balance":"jbq","scheduler":"mqos","resources":["cpu"],"classes":[
		{"name":"gold","weight":3,"queued":2,"in_flight":1,"sent":30,"used":{"cpu":75},"refused_full":1,"refused_late":2,"refused_admission":3,"wait_ms_p99":12.34},
		{"name":"free","weight":1,"sent":10,"used":{"cpu":25}}],
		"servers":[{"url":"http://a:1","in_flight":4,"sent":40,"failed":5,"mean_departure_ms":2.5,"answer_ms":12.5,"ejected":true,"free":{"cpu":33}}]}`
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer 0123456789abcdef" || r.URL.Path != "/status" {
			http.Error(w, "who are you?", http.StatusUnauthorized)
			return
		}
		_, _ = w.Write([]byte(status))
	}))
	defer server.Close()
	token := testkit.File(t, "token", "0123456789abcdef\n")
	do := func(args ...string) string {
		var out bytes.Buffer
		args = append([]string{"gateway", "status", "--gateway-address", server.Listener.Addr().String()}, args...)
		if err := run(t.Context(), args, strings.NewReader(""), &out, &out); err != nil {
			out.WriteString("error: " + err.Error())
		}
		return strings.TrimSpace(out.String())
	}
	const want = `CLASS  WEIGHT  QUEUED  IN-FLIGHT  SENT  REFUSED  P99-WAIT  USED-CPU
gold   3       2       1          30    6        12.3ms    75.0%
free   1       0       0          10    0        0.0ms     25.0%

SERVER      STATE    IN-FLIGHT  SENT  FAILED  T       ANSWER   FREE-CPU
http://a:1  ejected  4          40    5       2.50ms  12.50ms  33%`
	if got := do("--token-file", token); got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
	if got := do("--token-file", token, "--output", "json"); !strings.Contains(got, `"mean_departure_ms": 2.5`) {
		t.Error(got)
	}
	testkit.Equal(t, do(), "error: 401 Unauthorized: who are you?")
	server.Close()
	if got := do(); !strings.HasPrefix(got, "error: dial tcp 127.0.0.1:") || !strings.HasSuffix(got, "nothing listens there; start it, or name another address") {
		t.Error(got)
	}
}
