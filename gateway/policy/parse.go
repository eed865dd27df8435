package policy

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"net/textproto"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/BurntSushi/toml"
)

// Bounds of a policy. Parse refuses a file beyond these bounds.
const (
	maxFile      = 4 << 20 // bytes
	maxResources = 8       // limit of gateway/schedule
	maxUnits     = 1e15
)

// Parse reads a policy. The error joins all faults, each with its line number, with two exceptions.
// Parse reports only the first value of a wrong type in a class. A top-level value or a timeout of
// a wrong type is the only fault in the error.
func Parse(text []byte) (*Policy, error) {
	var file struct {
		TrustedHeaders []string       `toml:"trusted_headers"`
		TrustedPeers   []netip.Prefix `toml:"trusted_peers"`
		Timeouts       Timeouts
		Class          []toml.Primitive
		Server, Cost   []map[string]any
	}
	file.Timeouts = Timeouts{Header: 10 * time.Second, Body: 30 * time.Second, Idle: time.Minute, ServerIdle: 30 * time.Second, Response: time.Minute, Drain: 30 * time.Second}
	if len(text) > maxFile {
		return nil, fmt.Errorf("more than %d bytes", maxFile)
	}
	meta, err := toml.Decode(string(text), &file)
	if syntax, ok := errors.AsType[toml.ParseError](err); ok {
		return nil, fmt.Errorf("line %d: %s", syntax.Position.Line, syntax.Message)
	} else if err != nil {
		return nil, errors.New(strings.TrimPrefix(err.Error(), "toml: "))
	}
	r := &reader{lines: strings.Split(string(text), "\n")}
	r.TrustedPeers, r.Timeouts = file.TrustedPeers, file.Timeouts
	for _, name := range file.TrustedHeaders {
		r.TrustedHeaders = append(r.TrustedHeaders, textproto.CanonicalMIMEHeaderKey(name))
	}
	for i, d := range []time.Duration{r.Timeouts.Header, r.Timeouts.Body, r.Timeouts.Idle, r.Timeouts.ServerIdle, r.Timeouts.Response, r.Timeouts.Drain} {
		bounds(r, "timeouts", 0, []string{"header", "body", "idle", "server_idle", "response", "drain"}[i], d, time.Millisecond, time.Hour)
	}
	unread := false // a class has a value of a wrong type
	for i, table := range file.Class {
		c := newClass("")
		if err := meta.PrimitiveDecode(table, &c); err != nil {
			key, fault := "", err.Error()
			// The library reports the line of the last class with this key.
			if _, class, ok := strings.Cut(fault, `(last key "class.`); ok {
				key, fault, _ = strings.Cut(class, `"): `)
				key, _, _ = strings.Cut(key, ".")
			}
			r.fault("class", i, key, "%s", fault)
			unread = true
			continue
		}
		r.class(i, &c)
		r.Classes = append(r.Classes, c)
	}
	if !slices.ContainsFunc(r.Classes, func(c Class) bool { return len(c.Match) == 0 }) {
		r.Classes = append(r.Classes, newClass(Default))
	}
	r.resources("server", file.Server, "url", "host", "ca_file")
	r.resources("cost", file.Cost, "path")
	slices.Sort(r.Resources)
	for i, s := range file.Server {
		r.server(i, s)
	}
	for i, c := range file.Cost {
		path, _ := c["path"].(string)
		r.path("cost", i, "path", path)
		r.Costs = append(r.Costs, Cost{Path: path, Units: r.units("cost", i, c)})
	}
	for i, name := range r.Resources {
		if !slices.ContainsFunc(r.Servers, func(s Server) bool { return s.Capacity[i] > 0 }) {
			r.Warnings = append(r.Warnings, fmt.Sprintf("no server has a capacity of %q: its costs count for nothing", name))
		}
	}
	for _, key := range meta.Undecoded() {
		if key[0] != "server" && key[0] != "cost" && !(key[0] == "class" && unread) {
			at := slices.IndexFunc(r.lines, func(line string) bool { return strings.Contains(line, key[len(key)-1]) })
			r.faults = append(r.faults, fmt.Errorf("line %d: %s: unknown key", at+1, key))
		}
	}
	if len(r.faults) > 0 {
		return nil, errors.Join(r.faults...)
	}
	return &r.Policy, nil
}

// newClass returns a class with the default values.
func newClass(name string) Class {
	return Class{Name: name, Weight: 1, Queue: 1000, QueueBytes: 64 << 20, Wait: 2 * time.Second, MinBodyRate: 1 << 10, Failure: "closed"}
}

// reader fills a policy and collects faults.
type reader struct {
	Policy
	lines  []string
	faults []error
}

// fault adds a fault of a key in the n-th table of a kind, counted from 0.
func (r *reader) fault(table string, n int, key, format string, args ...any) {
	location := fmt.Sprintf("line %d: %s: ", r.line(table, n, key), strings.TrimSuffix(table+"."+key, "."))
	r.faults = append(r.faults, errors.New(location+fmt.Sprintf(format, args...)))
}

// line returns the line of the key in the n-th table. If the table lacks the key, line returns the
// first line of the table; if the table is inline, line returns 0.
func (r *reader) line(table string, n int, key string) (began int) {
	for i, text := range r.lines {
		name, _, _ := strings.Cut(text, "=")
		name = strings.Trim(name, " \t\"'")
		header, _, _ := strings.Cut(strings.TrimLeft(name, "[ "), "]")
		switch isHeader := strings.HasPrefix(name, "["); {
		case isHeader && began > 0:
			return began
		case isHeader && strings.TrimSpace(header) == table:
			if n--; n < 0 {
				began = i + 1
			}
		case began > 0 && name == key:
			return i + 1
		}
	}
	return began
}

func (r *reader) class(n int, c *Class) {
	bounds(r, "class", n, "weight", c.Weight, 1, 1000)
	bounds(r, "class", n, "queue", c.Queue, 1, 1_000_000)
	bounds(r, "class", n, "queue_bytes", c.QueueBytes, 1, 1<<40)
	bounds(r, "class", n, "min_body_rate", c.MinBodyRate, 0, 1<<40)
	bounds(r, "class", n, "wait", c.Wait, time.Millisecond, time.Hour)
	if c.FailOpen = c.Failure == "open"; !c.FailOpen && c.Failure != "closed" {
		r.fault("class", n, "on_admission_failure", "%.100q is neither open nor closed", c.Failure)
	}
	if c.Name == "" || strings.ContainsFunc(c.Name, func(c rune) bool { return c <= ' ' || c > '~' || c == '"' }) {
		r.fault("class", n, "name", "%q: a class needs a name of printable ASCII without spaces and quotes", c.Name)
	} else if slices.ContainsFunc(r.Classes, func(o Class) bool { return o.Name == c.Name }) {
		r.fault("class", n, "name", "%q is the name of another class, too", c.Name)
	} else if c.Name == Default && len(c.Match) > 0 {
		r.fault("class", n, "name", "%q is the class of what no other matches", c.Name)
	}
	if c.Match != nil && len(c.Match) == 0 {
		r.fault("class", n, "match", "is empty: leave it out to match every request")
	}
	for i := range c.Match {
		m := &c.Match[i]
		var rule []string
		for _, part := range [][2]string{{"tenant", m.Tenant}, {"method", m.Method}, {"host", m.Host}, {"path", m.Path}, {"query", m.Query}, {"header", m.Header}} {
			if part[1] != "" {
				rule = append(rule, fmt.Sprintf("%s %q", part[0], part[1]))
			}
		}
		if m.Path != "" {
			r.path("class", n, "match", m.Path)
		}
		if strings.Trim(m.Method, "ABCDEFGHIJKLMNOPQRSTUVWXYZ") != "" {
			r.fault("class", n, "match", "method %.100q: want capital letters, such as POST", m.Method)
		}
		if m.Host != "" && (m.Host != hostOf(m.Host) || strings.ContainsAny(m.Host, "/ *")) {
			r.fault("class", n, "match", "host %.100q: want a name or an address without port, such as shop.example", m.Host)
		}
		if m.Query != "" {
			m.Query, m.QueryValue, _ = strings.Cut(m.Query, "=")
			if m.Query == "" {
				r.fault("class", n, "match", `query is not of the form "name=value"`)
			}
		}
		if m.Header != "" {
			name, value, ok := strings.Cut(m.Header, ":")
			m.Header, m.Value = textproto.CanonicalMIMEHeaderKey(strings.TrimSpace(name)), strings.TrimSpace(value)
			if !ok || m.Header == "" {
				r.fault("class", n, "match", `header %q is not of the form "Name: value"`, name)
			} else if !slices.Contains(r.TrustedHeaders, m.Header) {
				r.Warnings = append(r.Warnings, fmt.Sprintf("line %d: match %d of class %q never holds: trusted_headers does not list %s", r.line("class", n, "match"), i+1, c.Name, m.Header))
			}
		}
		if len(rule) == 0 {
			r.fault("class", n, "match", "number %d names no tenant, method, host, path, query or header", i+1)
		}
		m.rule = fmt.Sprintf("match %d of class %q: %s", i+1, c.Name, strings.Join(rule, " and "))
	}
}

// resources adds the resources that the tables name: all keys except none.
func (r *reader) resources(kind string, tables []map[string]any, empty ...string) {
	for n, table := range tables {
		for _, name := range slices.Sorted(maps.Keys(table)) {
			if slices.Contains(empty, name) || slices.Contains(r.Resources, name) {
				continue
			}
			if len(name) > 32 || strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789_") != "" {
				r.fault(kind, n, name, "a resource has a name of at most 32 letters a-z, digits and _")
			}
			if r.Resources = append(r.Resources, name); len(r.Resources) == maxResources+1 {
				r.fault(kind, n, name, "more than %d resources", maxResources)
			}
		}
	}
}

func (r *reader) server(n int, table map[string]any) {
	text, _ := table["url"].(string)
	text = strings.TrimRight(text, "/")
	u, err := url.Parse(text)
	h2c := err == nil && u.Scheme == "h2c"
	if h2c {
		u.Scheme = "http"
	}
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		r.fault("server", n, "url", "%q is no http, https or h2c URL of a host and, at most, a path", text)
	} else if slices.ContainsFunc(r.Servers, func(s Server) bool { return s.URL == text }) {
		r.fault("server", n, "url", "%q is the URL of another server, too", text)
	}
	reach := Reach{H2C: h2c, Host: r.text("server", n, table, "host"), CAFile: r.text("server", n, table, "ca_file")}
	if strings.ContainsFunc(reach.Host, func(c rune) bool { return c <= ' ' || c > '~' || c == '/' || c == '@' }) {
		r.fault("server", n, "host", "%q is no host name", reach.Host)
	}
	if reach.CAFile != "" && err == nil && u.Scheme != "https" {
		r.fault("server", n, "ca_file", "is for https alone")
	}
	r.Servers = append(r.Servers, Server{URL: text, Target: u, Reach: reach, Capacity: r.units("server", n, table)})
}

// text returns a string from a table; "": not given.
func (r *reader) text(kind string, n int, table map[string]any, key string) string {
	v, given := table[key]
	text, ok := v.(string)
	if given && (!ok || text == "") {
		r.fault(kind, n, key, "%.100q is no text", fmt.Sprint(v))
	}
	return text
}

// units returns the numbers of a server or a cost, by resource.
func (r *reader) units(kind string, n int, table map[string]any) []float64 {
	units := make([]float64, len(r.Resources))
	for i, name := range r.Resources {
		v, given := table[name]
		if whole, ok := v.(int64); ok {
			v = float64(whole)
		}
		if units[i], _ = v.(float64); given && !(units[i] > 0 && units[i] <= maxUnits) {
			r.fault(kind, n, name, "%.100s is no number of units above 0 and up to %g", fmt.Sprint(table[name]), maxUnits)
		}
	}
	return units
}

func (r *reader) path(table string, n int, key, path string) {
	if clean(path) != path {
		r.fault(table, n, key, "%q matches nothing: a path begins with / and has no empty, . or .. element", path)
	}
}

func bounds[T cmp.Ordered](r *reader, table string, n int, key string, v, lowest, highest T) {
	if v < lowest || v > highest {
		r.fault(table, n, key, "%v is outside %v .. %v", v, lowest, highest)
	}
}
