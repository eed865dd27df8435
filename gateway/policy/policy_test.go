package policy_test

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/gateway/policy"
)

const full = `
trusted_headers = ["x-plan"]
trusted_peers = ["10.0.0.0/8", "::1"]

[timeouts]
header = "5s"

[[class]]
name = "paid"
weight = 6
match = [{ tenant = "acme" }, { path = "/report/" }, { header = "X-Plan: gold" }, { path = "/api/", tenant = "umbrella" }]
queue = 50
queue_bytes = 1_000_000
wait = "500ms"
admission = "tenant/{tenant}/{class}"
on_admission_failure = "open"

[[class]] # free
name = "free"
weight = 3
[[class.match]]
path = "/"
header = "X-Secret: yes"

[[server]]
url = "http://127.0.0.1:8001/"
cpu = 100
disk = 50.5

[[server]]
url = "http://127.0.0.1:8002"

[[cost]]
path = "/report/"
cpu = 5
tokens = 1

[[cost]]
path = "/"
cpu = 1
`

func parse(t *testing.T, text string) *policy.Policy {
	t.Helper()
	p, err := policy.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestParse(t *testing.T) {
	p := parse(t, full)
	var names []string
	for _, c := range p.Classes {
		names = append(names, fmt.Sprint(c.Name, c.Weight))
	}
	if want := []string{"paid6", "free3", "default1"}; !slices.Equal(names, want) {
		t.Errorf("classes %v, want %v", names, want)
	}
	c := p.Classes[0]
	if c.Queue != 50 || c.QueueBytes != 1_000_000 || c.Wait != 500*time.Millisecond || !c.FailOpen || p.Classes[1].FailOpen {
		t.Errorf("class %+v", c)
	}
	if got := c.AdmissionKey("acme"); got != "tenant/acme/paid" {
		t.Errorf("admission key %q", got)
	}
	if want := []string{"cpu", "disk", "tokens"}; !slices.Equal(p.Resources, want) {
		t.Errorf("resources %v, want %v", p.Resources, want)
	}
	if s := p.Servers[0]; s.URL != "http://127.0.0.1:8001" || !slices.Equal(s.Capacity, []float64{100, 50.5, 0}) {
		t.Errorf("server %+v", s)
	}
	for path, want := range map[string][]float64{"/report/1": {5, 0, 1}, "/report/../1": {1, 0, 0}} {
		if got := p.CostOf(path); !slices.Equal(got, want) {
			t.Errorf("cost of %s: %v, want %v", path, got, want)
		}
	}
	if p.Timeouts.Header != 5*time.Second || p.Timeouts.Drain != 30*time.Second {
		t.Errorf("timeouts %+v", p.Timeouts)
	}
	if len(p.TrustedPeers) != 2 || p.TrustedPeers[1].String() != "::1/128" {
		t.Errorf("trusted peers %v", p.TrustedPeers)
	}
	if w := strings.Join(p.Warnings, "\n"); !strings.Contains(w, `line 18: [[class]] 2, match 1 never holds: trusted_headers does not list X-Secret`) ||
		!strings.Contains(w, `no server has a capacity of "tokens"`) {
		t.Errorf("warnings %s", w)
	}
	if p := parse(t, ""); len(p.Classes) != 1 || p.Classes[0].Name != policy.Default || p.CostOf("/") != nil {
		t.Errorf("an empty policy is %+v", p)
	}
}

func TestFaultsHaveTheirLine(t *testing.T) {
	class := "[[class]]\nname = \"a\"\n"
	for _, test := range []struct{ name, text, want string }{
		{"syntax", class + "weight = \n", "line 3: "},
		{"not UTF-8", "a = \"\xff\"", "line 1: "},
		{"unknown key of the file", "[[klass]]\n", "line 0: klass: unknown key"},
		{"unknown key of a class", class + "wieght = 1\n", "line 3: [[class]] 1, wieght: unknown key"},
		{"unknown key of a match", class + "match = [{ tenan = \"x\" }]\n", "line 3: [[class]] 1, match 1, tenan: unknown key"},
		{"unknown key of timeouts", "[timeouts]\nread = \"1s\"\n", "line 2: [timeouts], read: unknown key"},
		{"second of two", class + "weight = 1\n\n[[class]]\nname = \"b\"\nweight = 0\n", "line 7: [[class]] 2, weight: 0 is outside 1 .. 1000"},
		{"type", class + "weight = \"six\"\n", "line 3: [[class]] 1, weight: six is not a whole number"},
		{"no name", "[[class]]\n", `line 1: [[class]] 1, name: ""`},
		{"name twice", class + class, "line 4: [[class]] 2, name: \"a\" is the name of another class, too"},
		{"default twice", "[[class]]\nname = \"default\"\nmatch = [{ path = \"/x\" }]\n", `"default" is the name of another class`},
		{"duration", class + "wait = \"2\"\n", `line 3: [[class]] 1, wait: "2" is no duration`},
		{"no wait", class + "wait = \"0s\"\n", "line 3: "},
		{"failure", class + "on_admission_failure = \"ajar\"\n", `line 3: [[class]] 1, on_admission_failure: "ajar" is neither open nor closed`},
		{"empty match", class + "match = []\n", "line 3: [[class]] 1, match: is empty"},
		{"match of nothing", class + "match = [{}]\n", "names no tenant, path or header"},
		{"match of a list", class + "match = [1]\n", "line 3: [[class]] 1, match: 1 is not a table"},
		{"unclean path", class + "match = [{ path = \"/a/../b\" }]\n", `"/a/../b" can match nothing`},
		{"relative path", class + "match = [{ path = \"a\" }]\n", `"a" can match nothing`},
		{"header", class + "match = [{ header = \"X-Plan\" }]\n", `"X-Plan" is not of the form "Name: value"`},
		{"url", "[[server]]\nurl = \"ftp://x\"\n", `line 2: [[server]] 1, url: "ftp://x" is no http or https URL`},
		{"url with a password", "[[server]]\nurl = \"http://a:b@x\"\n", "line 2: "},
		{"no url", "[[server]]\ncpu = 1\n", "line 1: [[server]] 1, url"},
		{"url twice", "[[server]]\nurl = \"http://x\"\n[[server]]\nurl = \"http://x/\"\n", "line 4: [[server]] 2, url"},
		{"capacity", "[[server]]\nurl = \"http://x\"\ncpu = 0\n", "line 3: [[server]] 1, cpu: 0 is outside"},
		{"infinite", "[[server]]\nurl = \"http://x\"\ncpu = inf\n", "line 3: "},
		{"no number", "[[server]]\nurl = \"http://x\"\ncpu = \"100\"\n", "line 3: [[server]] 1, cpu: 100 is not a number"},
		{"resource", "[[server]]\nurl = \"http://x\"\nCPU = 1\n", "line 3: [[server]] 1, CPU: a resource has a name of"},
		{"cost without a path", "[[cost]]\ncpu = 1\n", "line 1: [[cost]] 1, path"},
		{"class is a table", "[class]\nname = \"a\"\n", "class: map[name:a] is not a list of tables"},
		{"peer", "trusted_peers = [\"me\"]\n", `line 1: trusted_peers: "me" is neither an address nor a prefix`},
		{"headers", "trusted_headers = [1]\n", "line 1: trusted_headers: 1 is not a text"},
	} {
		p, err := policy.Parse([]byte(test.text))
		if err == nil || p != nil {
			t.Errorf("%s: accepted", test.name)
			continue
		}
		if want := strings.TrimPrefix(test.want, "line 0: "); !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want %s", test.name, err, want)
		}
	}
	_, err := policy.Parse([]byte(class + "weight = 0\nqueue = -1\n"))
	if n := len(strings.Split(err.Error(), "\n")); n != 2 {
		t.Errorf("%d faults, want both: %v", n, err)
	}
}

func TestClassify(t *testing.T) {
	p := parse(t, full)
	for _, test := range []struct {
		tenant, url string
		header      http.Header
		class, rule string
	}{
		{"acme", "/", nil, "paid", `match 1 of class "paid": tenant "acme"`},
		{"Acme", "/", nil, "default", "every request"},
		{"", "/report/x", nil, "paid", `match 2 of class "paid": path "/report/"`},
		{"", "/report", nil, "default", ""},
		{"", "/report/", nil, "paid", ""},
		{"", "/Report/x", nil, "default", ""}, // paths have a case
		{"", "/reporting", nil, "default", ""},
		{"", "/report/../x", nil, "default", ""},
		{"", "/report/..", nil, "default", ""},
		{"", "/report/%2e%2e/x", nil, "default", ""},
		{"", "/report/%2E./x", nil, "default", ""},
		{"", "/report/%252e%252e/x", nil, "paid", ""}, // decoded once, a name as any other
		{"", "/x/../report/", nil, "paid", ""},
		{"", "/x/..//report/y", nil, "paid", ""},
		{"", "//report//x", nil, "paid", ""},
		{"", "/./report/x", nil, "paid", ""},
		{"", "/../../report/x", nil, "paid", ""},
		{"", "/r%65port/x", nil, "paid", ""},
		{"", "/x/%2e%2e%2freport/y", nil, "paid", ""},
		{"", "/report/.hidden", nil, "paid", ""},
		{"", "/x?/report/", nil, "default", ""},
		{"", "/", http.Header{"X-Plan": {"gold"}}, "paid", `match 3 of class "paid": header "X-Plan: gold"`},
		{"", "/", http.Header{"X-Plan": {"Gold"}}, "default", ""},
		{"", "/", http.Header{"X-Plan": {"gold", "gold"}}, "default", ""},
		{"", "/", http.Header{"X-Plan": {"free", "gold"}}, "default", ""},
		{"", "/", http.Header{"X-Plan": {"gold, free"}}, "default", ""},
		{"", "/", http.Header{"X-Secret": {"yes"}}, "default", ""}, // not trusted
		{"umbrella", "/api/x", nil, "paid", `match 4 of class "paid": tenant "umbrella" and path "/api/"`},
		{"umbrella", "/x", nil, "default", ""},
		{"", "/api/x", nil, "default", ""},
		{"", "*", nil, "default", ""}, // OPTIONS *
	} {
		path := test.url
		if u, err := url.ParseRequestURI(test.url); err == nil {
			path = u.Path
		}
		class, rule := p.Classify(test.tenant, path, test.header)
		if got := p.Classes[class].Name; got != test.class || test.rule != "" && rule != test.rule {
			t.Errorf("%q %s %v: %s by %s, want %s by %s", test.tenant, test.url, test.header, got, rule, test.class, test.rule)
		}
	}
}

func TestClassifyDoesNotAllocate(t *testing.T) {
	p := parse(t, full)
	header := http.Header{"X-Plan": {"silver"}}
	if n := testing.AllocsPerRun(100, func() { p.Classify("nobody", "/some/path", header); p.CostOf("/some/path") }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// A policy is refused with faults, or it has a class for whatever comes.
func FuzzParse(f *testing.F) {
	f.Add([]byte(full), "acme", "/report/x")
	f.Add([]byte("[[class]]\nname = \"a\"\nmatch = [{ path = \"/\" }]\n"), "", "/../%2e")
	f.Add([]byte("class = [{ name = \"a\" }]\nserver = [{ url = \"http://x\", cpu = 1 }]"), "x", "")
	f.Add([]byte("timeouts.body = \"1s\"\n[[cost]]\npath = \"/\"\nx = 1e3\n"), "x", "..")
	f.Fuzz(func(t *testing.T, text []byte, tenant, path string) {
		p, err := policy.Parse(text)
		if err != nil {
			if p != nil || err.Error() == "" {
				t.Fatalf("%v with %v", p, err)
			}
			return
		}
		class, rule := p.Classify(tenant, path, nil)
		if class < 0 || class >= len(p.Classes) || rule == "" {
			t.Fatalf("class %d of %d, rule %q", class, len(p.Classes), rule)
		}
		p.Classes[class].AdmissionKey(tenant)
		for _, c := range p.Classes {
			if c.Weight < 1 || c.Queue < 0 || c.Wait <= 0 {
				t.Fatalf("class %+v", c)
			}
		}
		if u := p.CostOf(path); u != nil && len(u) != len(p.Resources) {
			t.Fatalf("%d units of %d resources", len(u), len(p.Resources))
		}
		for _, s := range p.Servers {
			for _, c := range s.Capacity {
				if !(c >= 0 && c <= 1e15) {
					t.Fatalf("capacity %v", c)
				}
			}
		}
	})
}
