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
	"github.com/srtm-io/srtm/internal/testkit"
)

const full = `
trusted_headers = ["x-plan"]
trusted_peers = ["10.0.0.0/8", "::1/128"]

[timeouts]
header = "5s"

[[class]]
name = "paid"
weight = 6
match = [{ tenant = "acme" }, { path = "/report/" }, { header = "X-Plan: gold" }, { path = "/api/", tenant = "umbrella" }]
queue = 50
queue_bytes = 1_000_000
wait = "500ms"
min_body_rate = 0
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
	return testkit.Result(policy.Parse([]byte(text))).Must(t)
}

func TestParse(t *testing.T) {
	p := parse(t, full)
	var names []string
	for _, c := range p.Classes {
		names = append(names, fmt.Sprint(c.Name, c.Weight))
	}
	testkit.EqualSlices(t, names, []string{"paid6", "free3", "default1"}, "classes")
	c := p.Classes[0]
	if c.Queue != 50 || c.QueueBytes != 1_000_000 || c.Wait != 500*time.Millisecond || c.MinBodyRate != 0 || p.Classes[1].MinBodyRate != 1024 || !c.FailOpen || p.Classes[1].FailOpen {
		t.Errorf("class %+v", c)
	}
	testkit.Equal(t, c.AdmissionKey("acme"), "tenant/acme/paid", "admission key")
	testkit.EqualSlices(t, p.Resources, []string{"cpu", "disk", "tokens"}, "resources")
	if s := p.Servers[0]; s.URL != "http://127.0.0.1:8001" || !slices.Equal(s.Capacity, []float64{100, 50.5, 0}) {
		t.Errorf("server %+v", s)
	}
	for path, want := range map[string][]float64{"/report/1": {5, 0, 1}, "/report/../1": {1, 0, 0}} {
		testkit.EqualSlices(t, p.CostOf(path), want, "cost of %s", path)
	}
	if p.Timeouts.Header != 5*time.Second || p.Timeouts.Drain != 30*time.Second {
		t.Errorf("timeouts %+v", p.Timeouts)
	}
	if len(p.TrustedPeers) != 2 || p.TrustedPeers[1].String() != "::1/128" {
		t.Errorf("trusted peers %v", p.TrustedPeers)
	}
	if w := strings.Join(p.Warnings, "\n"); !strings.Contains(w, `line 19: match 1 of class "free" never holds: trusted_headers does not list X-Secret`) ||
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
		{"unknown key of the file", "a = 1\n", "line 1: a: unknown key"},
		{"unknown tables", "trusted_headers = []\n[[klass]]\n", "line 2: klass"},
		{"unknown key of a class", class + "[[class]]\nname = \"b\"\nwieght = 1\n", "line 5: class.wieght: unknown key"},
		{"unknown key of a match", class + "match = [{ path = \"/\", tenan = \"x\" }]\n", "line 3: class.match.tenan: unknown key"},
		{"unknown key of timeouts", "[timeouts]\nread = \"1s\"\n", "line 2: timeouts.read: unknown key"},
		{"timeouts", "[timeouts]\nbody = \"2h\"\n", "line 2: timeouts.body: 2h0m0s is outside 1ms .. 1h"},
		{"timeouts of no type", "[timeouts]\nbody = true\n", `line 2 (last key "timeouts.body"): incompatible types`},
		{"second of two", class + "weight = 1\n\n[[class]]\nname = \"b\"\nweight = 0\n", "line 7: class.weight: 0 is outside 1 .. 1000"},
		{"second of two, inline", "class = [{ name = \"a\" }, { name = \"b\", weight = 0 }]", "class.weight: 0 is outside"},
		{"type", class + "weight = \"six\"\n[[class]]\nname = \"b\"\nweight = 2\n", "line 3: class.weight: incompatible types"},
		{"no name", "[[class]]\n", `line 1: class.name: ""`},
		{"name twice", class + class, "line 4: class.name: \"a\" is the name of another class, too"},
		{"default of some", "[[class]]\nname = \"default\"\nmatch = [{ path = \"/x\" }]\n", `line 2: class.name: "default" is the class of what no other matches`},
		{"body rate", class + "min_body_rate = -1\n", "line 3: class.min_body_rate: -1 is outside 0 .. "},
		{"duration", class + "wait = \"2\"\n", "line 3: class.wait: "},
		{"duration without a unit", class + "wait = 2\n", "line 3: class.wait: 2ns is outside"},
		{"failure", class + "on_admission_failure = \"ajar\"\n", `line 3: class.on_admission_failure: "ajar" is neither open nor closed`},
		{"empty match", class + "match = []\n", "line 3: class.match: is empty"},
		{"method", class + "match = [{ method = \"post\" }]\n", "line 3: class.match: method \"post\": want capital letters"},
		{"host with a port", class + "match = [{ host = \"a:80\" }]\n", "line 3: class.match: host \"a:80\": want a name or an address without port"},
		{"query without a name", class + "match = [{ query = \"=x\" }]\n", "line 3: class.match: query is not of the form"},
		{"match of nothing", class + "match = [{}]\n", "line 3: class.match: number 1 names no tenant, method, host, path, query or header"},
		{"match of a list", class + "match = [1]\n", "line 3: class.match: "},
		{"match in a table of its own", class + "[[class.match]]\npath = \"a\"\n", "line 1: class.match: \"a\" matches nothing"},
		{"unclean path", class + "match = [{ path = \"/a/../b\" }]\n", `line 3: class.match: "/a/../b" matches nothing`},
		{"header", class + "match = [{ header = \"X-Plan\" }]\n", `line 3: class.match: header "X-Plan" is not of the form "Name: value"`},
		{"url", "[[server]]\nurl = \"ftp://x\"\n", `line 2: server.url: "ftp://x" is no http, https or h2c URL`},
		{"url with a password", "[[server]]\nurl = \"http://a:b@x\"\n", "line 2: "},
		{"no url", "[[server]]\ncpu = 1\n", "line 1: server.url"},
		{"url twice", "[[server]]\nurl = \"http://x\"\n[[server]]\nurl = \"http://x/\"\n", "line 4: server.url"},
		{"capacity", "[[server]]\nurl = \"http://x\"\ncpu = 0\n", "line 3: server.cpu: 0 is no number"},
		{"infinite", "[[server]]\nurl = \"http://x\"\ncpu = inf\n", "line 3: "},
		{"no number", "[[server]]\nurl = \"http://x\"\ncpu = \"100\"\n", "line 3: server.cpu: 100 is no number"},
		{"resource", "[[server]]\nurl = \"http://x\"\nCPU = 1\n", "line 3: server.CPU: a resource has a name of"},
		{"resources", "[[server]]\nurl = \"http://x\"\na=1\nb=1\nc=1\nd=1\ne=1\nf=1\ng=1\nh=1\ni=1\n", "line 11: server.i: more than 8 resources"},
		{"cost without a path", "[[cost]]\ncpu = 1\n", "line 1: cost.path"},
		{"class is a table", "[class]\nname = \"a\"\n", `line 1 (last key "class"): incompatible types`},
		{"peer", "trusted_peers = [\"me\"]\n", "line 1: "},
		{"headers", "trusted_headers = [1]\n", `line 1 (last key "trusted_headers"): incompatible types`},
	} {
		p, err := policy.Parse([]byte(test.text))
		if err == nil || p != nil {
			t.Errorf("%s: accepted", test.name)
			continue
		}
		if !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v; want %s", test.name, err, test.want)
		}
	}
	for _, text := range []string{
		class + "weight = 0\nqueue = -1\n",
		class + "weight = \"six\"\nqueue = 1\n[[class]]\nname = \"b\"\nweight = 0\n[[server]]\nurl = \"http://a\"\n",
		class + "weight = \"six\"\nqueue = 1\n[[server]]\nurl = \"ftp://a\"\n",
	} {
		_, err := policy.Parse([]byte(text))
		if n := len(strings.Split(err.Error(), "\n")); n != 2 {
			t.Errorf("%d faults, want both: %v", n, err)
		}
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
		class, rule := p.Classify(policy.Request{Tenant: test.tenant, Path: path, Header: test.header})
		if got := p.Classes[class].Name; got != test.class || test.rule != "" && rule != test.rule {
			t.Errorf("%q %s %v: %s by %s, want %s by %s", test.tenant, test.url, test.header, got, rule, test.class, test.rule)
		}
	}
}

// requests has classes by method, host and query.
const requests = `
[[class]]
name = "writes"
match = [{ method = "POST", host = "shop.example" }, { query = "kind=report 7", path = "/x" }, { host = "::1" }, { query = "debug" }]
`

func TestClassifyByMethodHostAndQuery(t *testing.T) {
	p := parse(t, requests)
	for _, test := range []struct {
		method, host, target string
		rule                 string // of class writes; "": default
	}{
		{"POST", "shop.example", "/", `match 1 of class "writes": method "POST" and host "shop.example"`},
		{"POST", "Shop.Example:8080", "/", `match 1 of class "writes": method "POST" and host "shop.example"`},
		{"GET", "shop.example", "/", ""},
		{"POST", "shop.example.org", "/", ""},
		{"post", "shop.example", "/", ""}, // methods have a case
		{"GET", "", "/x?a=1&kind=report+7", `match 2 of class "writes": path "/x" and query "kind=report 7"`},
		{"GET", "", "/x?k%69nd=report%207", `match 2 of class "writes": path "/x" and query "kind=report 7"`},
		{"GET", "", "/x?kind=report", ""},
		{"GET", "", "/x?kind=report+7&kind=report+7", ""}, // which of them a server uses is unknown
		{"GET", "", "/x?kind=report+7&kind=other", ""},
		{"GET", "", "/x?kind=%zz", ""},
		{"GET", "", "/y?kind=report+7", ""},
		{"GET", "[::1]:4195", "/", `match 3 of class "writes": host "::1"`},
		{"GET", "[::1]", "/", `match 3 of class "writes": host "::1"`},
		{"GET", "::1", "/", `match 3 of class "writes": host "::1"`},
		{"GET", "[::2]:1", "/", ""},
		{"GET", ":80", "/", ""},
		{"GET", "", "/?debug", `match 4 of class "writes": query "debug"`},
		{"GET", "", "/?debug=", `match 4 of class "writes": query "debug"`},
		{"GET", "", "/?debug=1", ""},
	} {
		u := testkit.Result(url.ParseRequestURI(test.target)).Must(t)
		class, rule := p.Classify(policy.Request{Method: test.method, Host: test.host, Path: u.Path, RawQuery: u.RawQuery})
		if test.rule == "" {
			testkit.Equal(t, class, 1, "%s %s%s: class by %s", test.method, test.host, test.target, rule)
		} else {
			testkit.Equal(t, rule, test.rule, "%s %s%s", test.method, test.host, test.target)
		}
	}
}

// A path that a lenient server resolves to another class is refused. A path that every server resolves
// alike, or without dots, is served.
func TestAmbiguousPaths(t *testing.T) {
	for path, want := range map[string]bool{
		"/paid/..;/free":           true, // Tomcat
		"/paid/..;a=b/free":        true,
		"/paid/..%3b/free":         true,
		"/paid/%2e%2e;/free":       true,
		"/paid/..;":                true,
		"/paid/x;/../../free":      true,
		"/paid/a/;/../../free":     true, // an empty element for Tomcat
		"/paid/.;/../free":         true,
		"/x/.;/report/":            true,
		"/paid/..%5cfree":          true, // IIS
		"/paid/..%5Cfree":          true,
		"/paid/..\\free":           true,
		"/paid/%2e%2e%5cfree":      true,
		"/paid\\..\\free":          true,
		"/paid/\\../free":          true,
		"/free//../paid/":          true, // strictly below /free
		"/paid//../../free":        true,
		"/free%2f..%2fpaid/":       true, // one element, if read strictly
		"/free%2F../paid/":         true,
		"/../app/paid":             true, // /app/paid, or below a server's own /app: /app/../app/paid
		"/%2e%2e/app/paid":         true,
		"/%2E./app/paid":           true,
		"/x/../../app/paid":        true,
		"/./../app/paid":           true,
		"/..":                      true,
		"http://a/../app/paid":     true,
		"/x/y/../../paid":          false,
		"/..x/...":                 false,
		"/":                        false,
		"/paid/../free":            false, // in the class of /free
		"/paid/%2e%2e/free":        false,
		"/paid/./x":                false,
		"/paid/...;/x":             false,
		"/paid/a..;b/x":            false,
		"/paid/x;jsessionid=1/y":   false,
		"/paid/x%5cy":              false,
		"/paid//x":                 false,
		"/paid/a%2fb":              false,
		"/paid/.hidden;x":          false,
		"/paid/x?next=/..;/a\\..":  false,
		"/paid/%252e%252e;/free":   false, // decoded once
		"http://a/paid/..;/free":   true,
		"http://a/paid/free;a/b.c": false,
	} {
		u := testkit.Result(url.ParseRequestURI(path)).Must(t)
		testkit.Equal(t, policy.Ambiguous(u), want, "%s", path)
	}
}

func TestClassifyDoesNotAllocate(t *testing.T) {
	p := parse(t, full)
	header := http.Header{"X-Plan": {"silver"}}
	p.Classes[0].Match = append(p.Classes[0].Match, parse(t, requests).Classes[0].Match...)
	u := &url.URL{Path: "/some/path"}
	r := policy.Request{Tenant: "nobody", Method: "POST", Host: "[::1]:80", Path: "/some/path", RawQuery: "a=1&kind=other", Header: header}
	testkit.Equal(t, testing.AllocsPerRun(100, func() { policy.Ambiguous(u); p.Classify(r); p.CostOf("/some/path") }), 0, "allocations")
}

// A policy is refused with faults, or it has a class for every request.
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
		class, rule := p.Classify(policy.Request{Tenant: tenant, Path: path, Host: path, RawQuery: path})
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

func TestHowServersAreReached(t *testing.T) {
	p, err := policy.Parse([]byte("[timeouts]\nserver_idle = \"5s\"\n[[server]]\nurl = \"h2c://a:1\"\ncpu = 3\n[[server]]\nurl = \"https://b\"\nhost = \"c\"\nca_file = \"d.pem\""))
	testkit.Must(t, err)
	testkit.Equal(t, p.Servers[0].Reach, policy.Reach{H2C: true}, "of h2c")
	testkit.Equal(t, p.Servers[0].Target.Scheme, "http", "scheme of h2c")
	testkit.Equal(t, p.Servers[1].Reach, policy.Reach{Host: "c", CAFile: "d.pem"}, "of https")
	testkit.Equal(t, p.Timeouts.ServerIdle, 5*time.Second, "idle time of connections to servers")
	testkit.Equal(t, len(p.Resources), 1, "resources")
	for fault, text := range map[string]string{
		`line 3: server.host: "a b" is no host name`: "[[server]]\nurl = \"http://a\"\nhost = \"a b\"",
		"line 3: server.ca_file: is for https alone": "[[server]]\nurl = \"http://a\"\nca_file = \"x\"",
		"line 3: server.host: \"7\" is no text":      "[[server]]\nurl = \"http://a\"\nhost = 7",
	} {
		if _, err := policy.Parse([]byte(text)); err == nil || err.Error() != fault {
			t.Errorf("%q: %v, want %s", text, err, fault)
		}
	}
}
