// Package policy has the operator's configuration of the gateway: the classes and their rules, the
// servers, the costs of requests, and the trusted headers and peers. Parse (parse.go) reads a policy
// from TOML, or returns all faults with their lines. The package is pure: the caller reads the file,
// and decides when to read the file again.
package policy

import (
	"net/netip"
	"net/url"
	"path"
	"slices"
	"strings"
	"time"
)

// Policy is the content of a policy file. A Policy does not change after Parse.
type Policy struct {
	// Classes has every [[class]], in the file's order. If every class has a Match, Parse appends the
	// class Default with weight 1.
	Classes []Class
	Servers []Server
	Costs   []Cost
	// Resources has the sorted names of the resources that servers and costs use. Capacity and Units
	// are indexed by Resources.
	Resources []string
	// TrustedHeaders has the canonical names of headers that may select a class.
	TrustedHeaders []string
	// TrustedPeers has the addresses that may send X-Forwarded-*.
	TrustedPeers []netip.Prefix
	Timeouts     Timeouts
	// Warnings lists valid entries that are probably mistakes, most with their line.
	Warnings []string
}

// Default is the name of the class that Parse adds.
const Default = "default"

// Class is one [[class]].
type Class struct {
	Name   string
	Weight int // 1 to 1000; default 1
	// Match has alternative conditions; empty: every request matches.
	Match []Match

	Queue      int           // maximum number of waiting requests; default 1000
	QueueBytes int64         `toml:"queue_bytes"` // maximum bytes of waiting requests: 1 KiB each, kept headers and declared bodies; default 64 MiB
	Wait       time.Duration // maximum wait of a request; default 2 s

	// MinBodyRate is the minimum average rate of a request's body, in bytes per second, after
	// Timeouts.Body. The time for which a server makes the client wait does not count. Default 1024. 0:
	// no minimum, for bodies that are streams.
	MinBodyRate int64 `toml:"min_body_rate"`

	// Admission is the key for the admission service; "": none. {tenant} and {class} stand for the
	// request's tenant and class.
	Admission string
	// FailOpen admits a request when the admission service does not answer. Otherwise the gateway
	// refuses the request.
	FailOpen bool   `toml:"-"`
	Failure  string `toml:"on_admission_failure"` // open or closed, from the file
}

// Match is a condition: all given fields must match.
type Match struct {
	Tenant string // "": any
	Method string // exact, such as POST; "": any
	Host   string // without port, in any case; "": any
	Path   string // prefix of the clean path; "": any
	Query  string // name of a query parameter; "": none; the file has "name=value"
	Header string // canonical name; "": none; the file has "Name: value"

	QueryValue string `toml:"-"` // exact decoded value of Query
	Value      string `toml:"-"` // exact value of Header

	rule string // text that Classify returns
}

// Server is one [[server]].
type Server struct {
	URL    string // http, https or h2c, without query and fragment
	Target *url.URL
	Reach  Reach
	// Capacity by Resources, in units per second; 0: not given.
	Capacity []float64
}

// Reach says how to connect to a server, beyond its URL.
type Reach struct {
	H2C    bool   // only HTTP/2 without TLS
	Host   string // host name in requests and in the server's certificate; "": the client's host in requests, the URL's in the certificate
	CAFile string // PEM file of authorities for the server's certificate; "": the system's
}

// Cost is a [[cost]]: the resources that a request to a path uses.
type Cost struct {
	Path  string    // prefix of the clean path
	Units []float64 // units by Resources
}

// Timeouts limit waits; each is 1 ms to 1 h.
type Timeouts struct {
	Header time.Duration // to read a request's header; default 10 s
	Body   time.Duration // between two reads of a request's body, see also MinBodyRate; default 30 s
	Idle   time.Duration // of a client's connection between requests; default 1 min
	// ServerIdle is how long an idle connection to a server is kept; default 30 s.
	ServerIdle time.Duration `toml:"server_idle"`
	Response   time.Duration // until a server has sent its header; default 1 min
	Drain      time.Duration // to empty the queues at the end; default 30 s
}

// Request is what selects the class of a request.
type Request struct {
	Tenant   string // from a token or a client certificate; "": none
	Method   string
	Host     string // as in the request, with or without port
	Path     string // URL.Path, percent-decoded once, so an encoded slash counts as a slash
	RawQuery string // URL.RawQuery
	Header   map[string][]string
}

// Classify returns the index of a request's class in Classes, and the rule that selected the class, for
// display. The first match in the file's order wins. The result is valid only for paths that are not
// Ambiguous. A header selects a class only if the header is in TrustedHeaders. A header or a query
// parameter selects a class only if it came once: of two values the server may use the other one.
// Classify allocates only to clean a path and to decode a query.
func (p *Policy) Classify(r Request) (class int, rule string) {
	r.Path, r.Host = clean(r.Path), hostOf(r.Host)
	for i := range p.Classes {
		c := &p.Classes[i]
		if len(c.Match) == 0 {
			return i, "every request"
		}
		for j := range c.Match {
			if m := &c.Match[j]; m.holds(&r, p.TrustedHeaders) {
				return i, m.rule
			}
		}
	}
	panic("policy: no class takes every request") // Parse adds such a class
}

// holds reports whether a request meets the condition.
func (m *Match) holds(r *Request, trusted []string) bool {
	return (m.Tenant == "" || m.Tenant == r.Tenant) &&
		(m.Method == "" || m.Method == r.Method) &&
		(m.Host == "" || strings.EqualFold(m.Host, r.Host)) &&
		strings.HasPrefix(r.Path, m.Path) &&
		(m.Query == "" || hasParameter(r.RawQuery, m.Query, m.QueryValue)) &&
		(m.Header == "" || slices.Contains(trusted, m.Header) && len(r.Header[m.Header]) == 1 && r.Header[m.Header][0] == m.Value)
}

// hostOf returns a host without its port, and an IPv6 address without brackets.
func hostOf(host string) string {
	if i := strings.LastIndexByte(host, ':'); i >= 0 && !strings.Contains(host[i:], "]") && (host[0] == '[' || strings.Count(host, ":") == 1) {
		host = host[:i]
	}
	return strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
}

// hasParameter reports whether a query has a parameter exactly once, with a value.
func hasParameter(query, name, value string) bool {
	found, equal := 0, false
	for query != "" {
		var pair string
		pair, query, _ = strings.Cut(query, "&")
		k, v, _ := strings.Cut(pair, "=")
		if k, ok := decoded(k); !ok || k != name {
			continue
		}
		found++
		v, ok := decoded(v)
		equal = ok && v == value
	}
	return found == 1 && equal
}

// decoded decodes a part of a query.
func decoded(part string) (string, bool) {
	if !strings.ContainsAny(part, "%+") {
		return part, true
	}
	part, err := url.QueryUnescape(part)
	return part, err == nil
}

// CostOf returns the units of a request to a path, by Resources, from the first [[cost]] with a prefix
// of the path. nil: no [[cost]] matches.
func (p *Policy) CostOf(urlPath string) []float64 {
	urlPath = clean(urlPath)
	for i := range p.Costs {
		if strings.HasPrefix(urlPath, p.Costs[i].Path) {
			return p.Costs[i].Units
		}
	}
	return nil
}

// Ambiguous reports whether servers differ in the meaning of a path with "." or "..", so the path may
// belong to another class at the server than at the gateway. Examples:
//   - /paid/..;/free is below /paid/, but Tomcat drops the text after a semicolon and serves /free.
//   - /paid/..\free is below /paid/, but for IIS a backslash is a slash, so IIS serves /free.
//   - Some servers count an empty element or an encoded slash for "..", others do not.
//   - Above the root there is nothing. But if the server's URL is http://a/app, the server takes
//     /../app/paid for the page that is /paid at the gateway.
//
// Browsers resolve dots before they send a path.
//
// A path without such elements is not ambiguous: Classify compares the bytes of the path, case
// sensitive and decoded once. Some servers ignore case, drop parameters (/report;x/), take a backslash
// for a slash, or decode twice. Such a server serves more paths as /report/ than the class of /report/
// has. Classify is therefore no access control.
func Ambiguous(u *url.URL) bool {
	differ := strings.ContainsAny(u.Path, `;\`) || strings.Contains(u.Path, "//") || strings.Contains(strings.ToLower(u.RawPath), "%2f")
	if !differ && !strings.Contains(u.Path, "/..") {
		return false
	}
	depth := 0
	for element := range strings.FieldsFuncSeq(u.Path, func(c rune) bool { return c == '/' || c == '\\' }) {
		switch name, _, _ := strings.Cut(element, ";"); name {
		default:
			depth++
			continue
		case "..":
			depth--
		case ".":
		}
		if differ || depth < 0 {
			return true
		}
	}
	return false
}

// AdmissionKey returns the key for the admission service; "": none.
func (c *Class) AdmissionKey(tenant string) string {
	if !strings.Contains(c.Admission, "{") {
		return c.Admission
	}
	return strings.NewReplacer("{tenant}", tenant, "{class}", c.Name).Replace(c.Admission)
}

// clean resolves empty elements, "." and ".." of a path, as a server does: /report/../x is not a
// report. A slash at the end stays.
func clean(p string) string {
	if strings.HasPrefix(p, "/") && !strings.Contains(p, "//") && !strings.Contains(p, "/.") {
		return p
	}
	c := path.Clean("/" + p)
	if c != "/" && (strings.HasSuffix(p, "/") || strings.HasSuffix(p, "/.") || strings.HasSuffix(p, "/..")) {
		c += "/"
	}
	return c
}
