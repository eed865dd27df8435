package gateway

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

func rewrite(t testing.TB, file, text string) {
	t.Helper()
	testkit.Must(t, os.WriteFile(file, []byte(text), 0o600))
}

// The gateway reads the policy's file again when the file has changed. A faulty file is only reported.
func TestPolicyIsReadAgain(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer server.Close()
	policy := func(class string) string {
		return fmt.Sprintf("[[class]]\nname = %q\n[[server]]\nurl = %q\n", class, server.URL)
	}
	g := start(t, policy("first"))
	class := func() string {
		res := testkit.Result(newClient(t).Get(g.URL)).Must(t)
		res.Body.Close()
		return res.Header.Get("SRTM-Class")
	}
	testkit.MustEqual(t, class(), "first")
	rewrite(t, g.policy, policy("second")+"nonsense = \n")
	testkit.WaitFor(t, "a log line about the fault", func() bool {
		return strings.Contains(g.Output(), "changed policy has faults; keeping the previous policy")
	})
	testkit.Equal(t, class(), "first")
	testkit.Must(t, os.Remove(g.policy))
	rewrite(t, g.policy, policy("third"))
	testkit.WaitFor(t, "the new policy", func() bool { return class() == "third" })
	if output, code := localtest.Command(t, localtest.Program(t, "tools/srtm"), "gateway", "status", "--gateway-address="+strings.TrimPrefix(g.admin, "http://")); code != 0 || !strings.Contains(output, "third") {
		t.Errorf("%d, %s", code, output)
	}
	for args, want := range map[string]string{
		"check":                   "1 class, 1 server, 0 resources",
		"explain --tenant=a /x?y": "class      third, weight 1: every request",
	} {
		words := strings.Fields(args)
		words = append(words[:1:1], append([]string{"--policy=" + g.policy}, words[1:]...)...)
		if output, code := localtest.Command(t, localtest.Racing(t, "gateway"), words...); code != 0 || !strings.Contains(output, want) {
			t.Errorf("%s: %d, %s", args, code, output)
		}
	}
}

// A stopping gateway accepts no more requests, and sends the waiting requests.
func TestEndEmptiesTheQueues(t *testing.T) {
	arrived, release := make(chan struct{}, 10), make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { arrived <- struct{}{}; <-release }))
	defer server.Close()
	g := start(t, fmt.Sprintf("[[class]]\nname = \"c\"\nwait = \"10m\"\n[[server]]\nurl = %q\ncpu = 1\n[[cost]]\npath = \"/\"\ncpu = 1000\n", server.URL))
	answers := make(chan string)
	const n = 4
	for range n {
		go func() {
			res, err := newClient(t).Get(g.URL)
			if err != nil {
				answers <- err.Error()
				return
			}
			res.Body.Close()
			answers <- res.Status
		}()
	}
	<-arrived
	testkit.WaitFor(t, "requests that wait", func() bool { return g.status(t).Classes[0].Queued == n-1 })
	g.Terminate()
	testkit.WaitFor(t, "an end of accepting", func() bool {
		c, err := net.Dial("tcp", strings.TrimPrefix(g.URL, "http://"))
		if err == nil {
			c.Close()
		}
		return err != nil
	})
	close(release)
	for range n {
		testkit.Equal(t, <-answers, "200 OK")
	}
	<-g.Done()
	testkit.NoError(t, g.Stop())
}

// The gateway can read the files of the prober and the monitor.
func TestProfileIsRead(t *testing.T) {
	dir := t.TempDir()
	cpu := dir + "/cpu.stat"
	served := 0
	var mu sync.Mutex
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		served++
		rewrite(t, cpu, fmt.Sprintf("usage_usec %d\n", 3000*served))
	}))
	defer server.Close()
	rewrite(t, cpu, "usage_usec 0\n")
	at := localtest.Ports(t, 1)[0]
	localtest.Run(t, localtest.Racing(t, "gateway"), at, "monitor", "--http-address="+at, "--cgroup="+dir)
	output, code := localtest.Command(t, localtest.Racing(t, "gateway"), "profile", "--server="+server.URL, "--monitor=http://"+at, "--url=/report/7", "--repeat=5")
	if code != 0 || !strings.Contains(output, "[[cost]]\npath = \"/report/7\"\ncpu = 3\n") {
		t.Fatalf("%d, %s", code, output)
	}
	profiles := dir + "/profiles.toml"
	rewrite(t, profiles, output)
	g := start(t, fmt.Sprintf("[[server]]\nurl = %q\ncpu = 1000\n", server.URL), "--profiles="+profiles)
	res := testkit.Result(newClient(t).Get(g.URL + "/report/7")).Must(t)
	res.Body.Close()
	// 3 of the 1000 units a second are 1.5 % of 200 ms.
	testkit.WaitFor(t, "its cost", func() bool { return g.status(t).Classes[0].Used["cpu"] == 1.5 })
}
