package mqtt

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// envSuite names a folder with Eclipse paho's interoperability suite.
const envSuite = "SRTM_MQTT_SUITE"

// suiteRules map the names of the suite. No rule matches test/nosubscribe: the suite wants the server to
// refuse this filter.
func suiteRules() (rules string) {
	for _, filter := range []string{"TopicA/#", "Topic/C", "/TopicA", "client_test5/#"} {
		rules += fmt.Sprintf("[[mqtt]]\nfilter = %q\ntopic = \"all\"\n", filter)
	}
	return rules + "[[mqtt]]\nfilter = \"$TopicA/#\"\ntopic = \"dollar\"\n"
}

// result is a line of a table: the test, mosquitto's result, and nsqd's results.
var result = regexp.MustCompile("(?m)^\\| `(\\w+)` \\| \\w+ \\| (passes|fails|either) \\| (passes|fails|either) \\|")

// The results of the interoperability suite are as docs/mqtt-conformance.md says.
func TestInteroperabilitySuite(t *testing.T) {
	suite := os.Getenv(envSuite)
	if suite == "" {
		t.Skipf("make mqtt-conformance runs it; %s names a folder with the suite", envSuite)
	}
	rules := filepath.Join(t.TempDir(), "rules.toml")
	testkit.Must(t, os.WriteFile(rules, []byte(suiteRules()), 0o600))
	page := testkit.Result(os.ReadFile(filepath.Join(testkit.Root(t), "docs", "mqtt-conformance.md"))).Must(t)
	chapters := strings.Split(string(page), "\n## MQTT ")
	testkit.MustEqual(t, len(chapters), 3)
	for i, module := range []string{"client_test", "client_test5"} {
		for column, qos := range []string{"2", "1"} {
			t.Run(module+" with QoS "+qos, func(t *testing.T) {
				t.Parallel()
				want := map[string]string{}
				for _, row := range result.FindAllStringSubmatch(chapters[1+i], -1) {
					want[row[1]] = row[2+column]
				}
				_, port, err := net.SplitHostPort(start(t, "--mqtt-rules="+rules).mqtt)
				testkit.Must(t, err)
				python := exec.CommandContext(t.Context(), "python3", "suite.py", filepath.Join(suite, "interoperability"), module, port, qos)
				python.Stderr = os.Stderr
				output := testkit.Result(python.StdoutPipe()).Must(t)
				testkit.Must(t, python.Start())
				for lines := bufio.NewScanner(output); lines.Scan(); {
					var got struct {
						Test, Why string
						OK        bool
					}
					testkit.Must(t, json.Unmarshal(lines.Bytes(), &got))
					text := map[bool]string{true: "passes", false: "fails"}[got.OK]
					if want[got.Test] != text && want[got.Test] != "either" {
						t.Errorf("%s %s, and the page says %q\n%s", got.Test, text, want[got.Test], got.Why)
					}
					delete(want, got.Test)
				}
				testkit.Must(t, python.Wait())
				testkit.Equal(t, len(want), 0, "tests that did not run: %v", want)
			})
		}
	}
}
