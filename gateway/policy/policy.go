package policy

import (
	"net/netip"
	"net/url"
	"path"
	"slices"
	"strings"
	"time"
)

// Policy is a file's content. It is not changed after Parse.
type Policy struct {
	// Classes has every [[class]] in the file's order. Where no class takes what the
	// others leave, Parse adds one, Default, of weight 1.
	Classes []Class
	Servers []Server
	Costs   []Cost
	// Resources are the names that servers and costs use, sorted: what Capacity and
	// Units are indexed by.
	Resources []string
	// TrustedHeaders may select a class; canonical names.
	TrustedHeaders []string
	// TrustedPeers may send X-Forwarded-*.
	TrustedPeers []netip.Prefix
	Timeouts     Timeouts
	// Warnings are what is allowed and probably not meant, each with its line.
	Warnings []string
}

// Default is the name of the class that Parse adds.
const Default = "default"

// Class is one [[class]].
type Class struct {
	Name   string
	Weight int // 1 .. 1000, 1 if it is not given
	// Match are alternatives; none means every request.
	Match []Match

	Queue      int           // requests that wait, at most; 1000
	QueueBytes int64         `toml:"queue_bytes"` // that they take, with 1 KiB each, their headers as they are kept, and declared bodies, at most; 64 MiB
	Wait       time.Duration // how long each waits, at most; 2 s

	// MinBodyRate is how many bytes a second of a body a client sends, at least, on the
	// average and beyond Timeouts.Body; what a server makes it wait does not count. 1024;
	// 0: no bound, for bodies that are streams.
	MinBodyRate int64 `toml:"min_body_rate"`

	// Admission is the key to ask admission for, "" for none; {tenant} and {class}
	// stand for the request's.
	Admission string
	// FailOpen admits a request when admission cannot be asked; else it is refused.
	FailOpen bool   `toml:"-"`
	Failure  string `toml:"on_admission_failure"` // open or closed, as it is in the file
}

// Match is one condition: all that it names must hold.
type Match struct {
	Tenant string // "" for any
	Path   string // prefix of the clean path, "" for any
	Header string // canonical name, "" for none; in the file with ": " and the value
	Value  string `toml:"-"` // of Header, exactly

	rule string // as Classify explains it
}

// Server is one [[server]].
type Server struct {
	URL    string // http, https or h2c, without query and fragment
	Target *url.URL
	Reach  Reach
	// Capacity in units a second, by Resources; 0 where it is not given.
	Capacity []float64
}

// Reach is how a server is reached, beyond its URL.
type Reach struct {
	H2C    bool   // HTTP/2 in clear, and nothing else
	Host   string // of each request, and of the server's certificate; "": the client's, and the URL's
	CAFile string // PEM certificates that vouch for the server's; "": those of the system
}

// Cost is one [[cost]]: what a request to a path takes.
type Cost struct {
	Path  string    // prefix of the clean path
	Units []float64 // by Resources
}

// Timeouts end what takes too long, 1 ms to 1 h.
type Timeouts struct {
	Header time.Duration // to read a request's header; 10 s
	Body   time.Duration // between two reads of a request's body, see also MinBodyRate; 30 s
	Idle   time.Duration // of a client's connection between requests; 1 min
	// ServerIdle is how long a connection to a server is kept between requests; 30 s.
	ServerIdle time.Duration `toml:"server_idle"`
	Response   time.Duration // until a server has sent its header; 1 min
	Drain      time.Duration // to empty the queues at the end; 30 s
}

// Classify returns the class of a request, as an index into Classes, and the rule that
// chose it, for people. The first match wins, in the order of the file; it holds for
// paths that are not Ambiguous. tenant comes from a token or client certificate, "" where
// there is none; urlPath is URL.Path, percent-decoded once, so that an encoded slash
// counts as one. A header selects a class only if it is one of TrustedHeaders and came
// once: of two values one may be the client's own. It does not allocate, unless the path
// has to be cleaned.
func (p *Policy) Classify(tenant, urlPath string, header map[string][]string) (class int, rule string) {
	urlPath = clean(urlPath)
	for i := range p.Classes {
		c := &p.Classes[i]
		if len(c.Match) == 0 {
			return i, "every request"
		}
		for j := range c.Match {
			m := &c.Match[j]
			if (m.Tenant == "" || m.Tenant == tenant) && strings.HasPrefix(urlPath, m.Path) &&
				(m.Header == "" || slices.Contains(p.TrustedHeaders, m.Header) && len(header[m.Header]) == 1 && header[m.Header][0] == m.Value) {
				return i, m.rule
			}
		}
	}
	panic("policy: no class takes every request") // Parse sees to it
}

// CostOf returns the units of a request to a path, by Resources: those of the first
// [[cost]] with a prefix of it, nil if there is none.
func (p *Policy) CostOf(urlPath string) []float64 {
	urlPath = clean(urlPath)
	for i := range p.Costs {
		if strings.HasPrefix(urlPath, p.Costs[i].Path) {
			return p.Costs[i].Units
		}
	}
	return nil
}

// Ambiguous reports whether servers differ in what a path with "." or ".." means, so that
// it could be of one class here and another's there: /paid/..;/free is below /paid/, but
// Tomcat, which drops what follows a semicolon, serves /free, and so does IIS, for which
// a backslash is a slash, with /paid/..\free. An empty element counts for ".." with some
// and not with others, as does an encoded slash. Above the root there is nothing, or, where
// a server's URL has a path, something else: at http://a/app, /../app/paid is what is
// /paid here. Browsers resolve dots before they send.
//
// Not ambiguous is what has no such element: classes are matched by the bytes that come,
// in their case, decoded once. A server that ignores case, drops parameters (/report;x/),
// takes a backslash for a slash, or decodes twice serves more paths as /report/ than are
// of the class of /report/; Classify is no access control for it.
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

// AdmissionKey returns the key to ask admission for, "" for none.
func (c *Class) AdmissionKey(tenant string) string {
	if !strings.Contains(c.Admission, "{") {
		return c.Admission
	}
	return strings.NewReplacer("{tenant}", tenant, "{class}", c.Name).Replace(c.Admission)
}

// clean returns what a path means: without empty elements, "." and "..", which a server
// resolves before it serves, so that /report/../x is not a report. A slash at the end
// stays.
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
