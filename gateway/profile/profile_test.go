package profile

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/srtm-io/srtm/gateway/policy"
	"github.com/srtm-io/srtm/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestMonitor(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		testkit.Must(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	file("cpu.stat", "usage_usec 2500\nuser_usec 2000\nsystem_usec 500\n")
	m := Monitor{Cgroup: dir, NetDev: file("dev", `Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 9000 1 0 0 0 0 0 0 9000 1 0 0 0 0 0 0
  eth0:1000 1 0 0 0 0 0 0 2000 1 0 0 0 0 0 0
  eth1: 500 1 0 0 0 0 0 0 500 1 0 0 0 0 0 0
`)}
	want := func(text string) {
		t.Helper()
		usage, err := m.Read()
		got, _ := json.Marshal(usage)
		if err != nil {
			got = []byte(err.Error())
		}
		if string(got) != text {
			t.Errorf("%s, want %s", got, text)
		}
	}
	want(`{"cpu":2.5,"net":4}`)
	file("io.stat", "8:0 rbytes=1000 wbytes=500 rios=1 wios=1 dbytes=7 dios=0\n8:16 rbytes=500 wbytes=0\n")
	m.Interface = "eth0"
	want(`{"cpu":2.5,"disk":2,"net":3}`)
	m.Interface = "eth7"
	want(`monitor: there is no interface "eth7"`)
	m.Interface = ""
	file("cpu.stat", "usage_usec many\n")
	want(`monitor: cpu.stat: strconv.ParseFloat: parsing "many": invalid syntax`)
	m.Cgroup = "/nosuch"
	want(`monitor: open /nosuch/cpu.stat: no such file or directory: --cgroup is to be a control group of version 2`)
}

// A site of three pages with different costs, plus one page when the site is shared.
func TestProfile(t *testing.T) {
	costs := map[string]Usage{"/": {"cpu": 1, "disk": 0}, "/report/a%20b": {"cpu": 20, "disk": 4}, "/img": {"cpu": 2, "disk": 30}}
	var mu sync.Mutex
	used := Usage{"cpu": 1000, "disk": 7}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /", func(w http.ResponseWriter, r *http.Request) {
		cost, ok := costs[r.URL.EscapedPath()]
		if !ok {
			http.NotFound(w, r)
			return
		}
		mu.Lock()
		defer mu.Unlock()
		for name, v := range cost {
			used[name] += v
		}
		fmt.Fprint(w, `<a href="/report/a%20b">a</a> <a href='/img#part'>b</a> <a href="http://elsewhere.example/">c</a> <a href="mailto:x">d</a> <a href="/broken">e</a>`)
	})
	mux.HandleFunc("GET /sitemap.xml", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "<urlset><url><loc>http://%[1]s/img</loc></url><url><loc> http://%[1]s/ </loc></url></urlset>", r.Host)
	})
	server := httptest.NewServer(mux)
	defer server.Close()
	monitor := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		testkit.NoError(t, json.NewEncoder(w).Encode(used))
	}))
	defer monitor.Close()
	at, err := url.Parse(server.URL)
	testkit.Must(t, err)
	for _, c := range []struct {
		name string
		cfg  Config
		want []string
	}{
		{"what links lead to", Config{}, []string{"/report/a b", "/img", "/"}},
		{"a sitemap", Config{Sitemap: "/sitemap.xml"}, []string{"/img", "/"}},
		{"a list", Config{URLs: []string{"/img", server.URL + "/img?x=1", "http://elsewhere.example/"}}, []string{"/img"}},
	} {
		c.cfg.Server, c.cfg.Monitor, c.cfg.Repeat, c.cfg.Client = at, monitor.URL, 4, server.Client()
		r, err := Run(t.Context(), c.cfg)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		var b strings.Builder
		testkit.Must(t, r.Write(&b))
		p, err := policy.Parse([]byte(b.String() + "[[server]]\nurl = \"http://a\"\ncpu = 1\ndisk = 1\n"))
		if err != nil || len(p.Costs) != len(c.want) || len(r.Warnings) > 0 || !(r.Capacity["disk"] > 0) {
			t.Errorf("%s: %v, %v\n%s", c.name, err, r.Warnings, b.String())
			continue
		}
		for i, path := range c.want {
			cost := costs[strings.ReplaceAll(path, " ", "%20")]
			if got := p.Costs[i]; got.Path != path || got.Units[0] != cost["cpu"] || got.Units[1] != cost["disk"] {
				t.Errorf("%s: %+v, want %s, %v", c.name, got, path, cost)
			}
		}
	}
	_, err = Run(t.Context(), Config{Server: at, Monitor: monitor.URL, URLs: []string{"/gone"}, Repeat: 1, Client: server.Client()})
	testkit.ErrorHas(t, err, "404", "a page that is not there")
	server.Client().CloseIdleConnections()
}

// Whatever pages a site links to and whatever a monitor reports, the policy parser can read the
// written file. A page that the policy can name has its cost.
func FuzzWrite(f *testing.F) {
	f.Add("/a", "cpu", 1.5)
	f.Add("/a//b/../c", "cpu", 1.5)
	f.Add("/%00%7f%0a%22%5c", "disk", 1e-300)
	f.Add("/%ff", "net", 1e16)
	f.Add("/a", "no name", 1.0)
	f.Fuzz(func(t *testing.T, path, resource string, units float64) {
		plain, err := url.PathUnescape(path)
		if err != nil {
			return // Run has paths from url.URL only
		}
		var b strings.Builder
		r := Result{Costs: map[string]Usage{path: {resource: units}, "/other": {"cpu": 2}}, Capacity: Usage{"cpu": 100}}
		testkit.Must(t, r.Write(&b))
		p, err := policy.Parse([]byte("[[server]]\nurl = \"http://a\"\ncpu = 1000\n" + b.String()))
		if err != nil {
			t.Fatalf("%v in\n%s", err, b.String())
		}
		if p.CostOf("/other") == nil || plain == "/a" && resource == "cpu" && units > 1e-9 && units < 1e9 && p.CostOf(plain) == nil {
			t.Fatalf("no cost of %q in\n%s", plain, b.String())
		}
	})
}
