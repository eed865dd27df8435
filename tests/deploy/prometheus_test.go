package deploy

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// A real Prometheus scrapes a cluster, evaluates every alert rule without an error, and sees that a broker is down.
func TestPrometheusEvaluatesTheRules(t *testing.T) {
	binary, err := exec.LookPath("prometheus")
	if err != nil {
		t.Skip("prometheus is not installed: ", err)
	}
	c := localtest.Start(t, 2, []string{"--fitting=off"}, "--mcap=20000")
	dir := t.TempDir()
	config := filepath.Join(dir, "prometheus.yaml")
	rules, err := filepath.Abs(filepath.Join(top, "deploy", "prometheus", "alerts.yaml"))
	testkit.Must(t, err)
	write(t, config, fmt.Sprintf(`
global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}
rule_files: [%q]
scrape_configs:
  - job_name: srtm
    static_configs: [{targets: [%q, %q, %q]}]
`, rules, c.Web, c.Brokers[0].HTTP, c.Brokers[1].HTTP))
	web := localtest.Ports(t, 1)[0]
	localtest.Run(t, binary, web+"/-/ready", "--config.file="+config, "--storage.tsdb.path="+dir, "--web.listen-address="+web)
	testkit.WaitFor(t, "three targets that are up", func() bool {
		text, _, _ := localtest.Ask(http.MethodGet, "http://"+web+"/api/v1/targets", "") // 503 until Prometheus is ready
		return strings.Count(text, `"health":"up"`) == 3
	})
	type rule struct{ Name, Health, State, LastError string }
	evaluated := func() (all []rule) {
		var answer struct {
			Data struct{ Groups []struct{ Rules []rule } }
		}
		testkit.Must(t, json.Unmarshal([]byte(localtest.MustAsk(t, http.MethodGet, "http://"+web+"/api/v1/rules", "")), &answer))
		for _, g := range answer.Data.Groups {
			all = append(all, g.Rules...)
		}
		return all
	}
	wanted := strings.Count(read(t, rules), "- alert:")
	testkit.WaitFor(t, "every rule evaluated", func() bool {
		done := 0
		for _, r := range evaluated() {
			if r.Health == "err" {
				t.Fatalf("%s: %s", r.Name, r.LastError)
			}
			if r.Health == "ok" {
				done++
			}
		}
		return done == wanted
	})
	testkit.Must(t, c.Brokers[1].Kill())
	testkit.WaitFor(t, "the alert of a daemon that is down", func() bool {
		for _, r := range evaluated() {
			if r.Name == "SRTMDaemonDown" && r.State == "pending" {
				return true
			}
		}
		return false
	})
}
