package main

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
)

// nginx sends requests with the lines that docs/admission.md shows. The test reads the lines from there.
func TestNginx(t *testing.T) {
	program, err := exec.LookPath("nginx")
	if err != nil {
		t.Skip("nginx is not installed")
	}
	docs := testkit.Result(os.ReadFile(filepath.Join(testkit.Root(t), "docs", "admission.md"))).Must(t)
	_, lines, _ := strings.Cut(string(docs), "```nginx\n")
	lines, _, _ = strings.Cut(lines, "```")
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "hello") }))
	defer backend.Close()
	at, admin := start(t, "--data-path", t.TempDir(), "--udp-address", "127.0.0.1:0")
	_, err = admin.SetRules(t.Context(), &srtmv1.SetRulesRequest{Rules: []*srtmv1.AdmissionRule{{Key: "user/ann", RefillMilli: 1, Capacity: 2}}})
	testkit.Must(t, err)
	for _, replace := range [][2]string{{"127.0.0.1:4191", at}, {"http://backend", backend.URL}} {
		if !strings.Contains(lines, replace[0]) {
			t.Fatalf("%s is not in docs/admission.md", replace[0])
		}
		lines = strings.ReplaceAll(lines, replace[0], replace[1])
	}
	dir, front := t.TempDir(), testkit.Address(t)
	config := filepath.Join(dir, "nginx.conf")
	text := fmt.Sprintf("daemon off; pid %[1]s/pid; error_log stderr warn; events {}\nhttp { access_log off; client_body_temp_path %[1]s/b; proxy_temp_path %[1]s/p; fastcgi_temp_path %[1]s/f; uwsgi_temp_path %[1]s/u; scgi_temp_path %[1]s/s;\nserver { listen %[2]s; location = /ping { return 200; }\n%[3]s}}", dir, front, lines)
	testkit.Must(t, os.WriteFile(config, []byte(text), 0o600))
	d := testkit.Result(local.Run(program, dir, []string{"-p", dir, "-c", config}, local.Answers("http://"+front+"/ping"))).Must(t)
	defer d.Stop()
	for i, want := range []int{200, 200, 403} {
		r := testkit.Result(http.NewRequest(http.MethodGet, "http://"+front+"/api/x", nil)).Must(t)
		r.Header.Set("X-User", "ann")
		reply := testkit.Result(web.Do(r)).Must(t)
		body := testkit.Result(io.ReadAll(reply.Body)).Must(t)
		reply.Body.Close()
		if got := string(body); reply.StatusCode != want || want == 200 && got != "hello" {
			t.Errorf("request %d: %d %s, want %d", i, reply.StatusCode, got, want)
		}
	}
	if got := get(t, front+"/api/x", ""); !strings.HasPrefix(got, "403") { // no user has the key user/
		t.Errorf("without a user: %s", got)
	}
}
