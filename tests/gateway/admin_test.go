package gateway

import (
	"bufio"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// Only a client with a token can read operators' pages, or connect from elsewhere. A client that only
// connects takes neither the clients' place nor all of the operators' places.
func TestAdminAddress(t *testing.T) {
	dir := t.TempDir()
	rewrite(t, dir+"/policy.toml", "[[server]]\nurl = \"http://127.0.0.1:1\"\n")
	rewrite(t, dir+"/tokens", "read-only a-token-of-sixteen-bytes-or-more\n")
	program := localtest.Racing(t, "gateway")
	for _, flags := range [][]string{nil, {"--token-file=" + dir + "/tokens"}, {"--allow-insecure-listen=http-address"}} {
		output, code := localtest.Command(t, program, append(flags, "--policy="+dir+"/policy.toml", "--http-address=127.0.0.1:0", "--admin-address=0.0.0.0:0")...)
		if code <= 0 || !strings.Contains(output, "--admin-address") {
			t.Errorf("%q beyond loopback: exit code %d\n%s", flags, code, output)
		}
	}
	policy, err := os.ReadFile(dir + "/policy.toml")
	testkit.Must(t, err)
	guarded := start(t, string(policy), "--token-file="+dir+"/tokens")
	for _, path := range []string{"/status", "/metrics", "/debug/state", "/debug/pprof/", "/debug/pprof/heap", "/nothing"} {
		if _, code, err := localtest.Ask(http.MethodGet, guarded.admin+path, ""); err != nil || code != http.StatusUnauthorized {
			t.Errorf("%s without a token: %d, %v", path, code, err)
		}
	}
	g := start(t, string(policy))
	refused := func() bool {
		// A client that only connects is cut after 5 s. On a busy machine this may be before the last
		// client connects.
		var last net.Conn
		for range 300 {
			c := testkit.Result(net.Dial("tcp", strings.TrimPrefix(g.admin, "http://"))).Must(t)
			defer c.Close()
			last = c
		}
		res, err := http.ReadResponse(bufio.NewReader(last), nil)
		return err == nil && res.StatusCode == http.StatusServiceUnavailable
	}
	testkit.WaitFor(t, "a refusal of one of too many operators", refused)
	res := testkit.Result(newClient(t).Get(g.URL)).Must(t)
	res.Body.Close()
}
