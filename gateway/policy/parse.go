package policy

import (
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

// Bounds of a policy: a file beyond them is refused.
const (
	maxTables    = 999  // classes, servers, costs, and matches of a class
	maxResources = 8    // gateway/schedule's
	maxText      = 1024 // bytes
	maxWeight    = 1000
	maxUnits     = 1e15
	longest      = time.Hour // of any duration
)

// Parse reads a policy. Its error joins every fault, each with the number of its line.
func Parse(text []byte) (*Policy, error) {
	var file map[string]any
	if _, err := toml.Decode(string(text), &file); err != nil {
		var syntax toml.ParseError
		if errors.As(err, &syntax) {
			return nil, fmt.Errorf("line %d: %s", syntax.Position.Line, syntax.Message)
		}
		return nil, err
	}
	r := &reader{lines: strings.Split(string(text), "\n"), trusted: map[string]bool{}}
	p := r.policy(&table{reader: r, has: file})
	if len(r.faults) > 0 {
		return nil, errors.Join(r.faults...)
	}
	return p, nil
}

// reader gathers faults.
type reader struct {
	lines   []string
	trusted map[string]bool
	faults  []error
}

func (r *reader) policy(t *table) *Policy {
	p := &Policy{trusted: r.trusted}
	for _, name := range t.texts("trusted_headers") {
		if name = textproto.CanonicalMIMEHeaderKey(name); !p.trusted[name] {
			p.trusted[name] = true
			p.TrustedHeaders = append(p.TrustedHeaders, name)
		}
	}
	for _, peer := range t.texts("trusted_peers") {
		prefix, err := netip.ParsePrefix(peer)
		if addr, plain := netip.ParseAddr(peer); plain == nil {
			prefix, err = addr.Prefix(addr.BitLen())
		}
		if err != nil {
			t.fault("trusted_peers", "%q is neither an address nor a prefix", peer)
		}
		p.TrustedPeers = append(p.TrustedPeers, prefix.Masked())
	}
	timeouts := &table{reader: r, name: "[timeouts]", line: r.find(0, "[timeouts]"), has: get(t, "timeouts", map[string]any(nil))}
	p.Timeouts = Timeouts{
		Header:   timeouts.duration("header", 10*time.Second, longest),
		Body:     timeouts.duration("body", 30*time.Second, longest),
		Idle:     timeouts.duration("idle", time.Minute, longest),
		Response: timeouts.duration("response", time.Minute, longest),
		Drain:    timeouts.duration("drain", 30*time.Second, longest),
	}
	timeouts.done()

	for _, c := range t.tables("class") {
		p.Classes = append(p.Classes, r.class(c, p))
	}
	if !slices.ContainsFunc(p.Classes, func(c Class) bool { return len(c.Match) == 0 }) {
		d := r.class(&table{reader: r, has: map[string]any{"name": Default}}, p)
		p.Classes = append(p.Classes, d)
	}
	servers, costs := t.tables("server"), t.tables("cost")
	p.Resources = r.resources(servers, costs)
	seen := map[string]bool{}
	for _, s := range servers {
		u := strings.TrimSuffix(s.text("url", ""), "/")
		if at, err := url.Parse(u); err != nil || at.Scheme != "http" && at.Scheme != "https" || at.Hostname() == "" || at.User != nil || at.RawQuery != "" || at.Fragment != "" {
			s.fault("url", "%q is no http or https URL of a host and, at most, a path", u)
		} else if seen[u] {
			s.fault("url", "%q is the URL of another server, too", u)
		}
		seen[u] = true
		p.Servers = append(p.Servers, Server{URL: u, Capacity: s.units(p.Resources)})
		s.done()
	}
	for _, c := range costs {
		cost := Cost{Path: c.text("path", ""), Units: c.units(p.Resources)}
		c.prefix(cost.Path)
		p.Costs = append(p.Costs, cost)
		c.done()
	}
	for i, name := range p.Resources {
		if !slices.ContainsFunc(p.Servers, func(s Server) bool { return s.Capacity[i] > 0 }) {
			p.Warnings = append(p.Warnings, fmt.Sprintf("no server has a capacity of %q: its costs count for nothing", name))
		}
	}
	t.done()
	return p
}

func (r *reader) class(t *table, p *Policy) Class {
	c := Class{
		Name:       t.text("name", ""),
		Weight:     int(t.integer("weight", 1, 1, maxWeight)),
		Queue:      int(t.integer("queue", 1000, 1, 1_000_000)),
		QueueBytes: t.integer("queue_bytes", 64<<20, 1, 1<<40),
		Wait:       t.duration("wait", 2*time.Second, longest),
		Admission:  t.text("admission", ""),
	}
	if c.Name == "" || strings.ContainsFunc(c.Name, func(c rune) bool { return c <= ' ' || c > '~' || c == '"' }) {
		t.fault("name", "%q: a class needs a name of printable ASCII without spaces and quotes", c.Name)
	} else if slices.ContainsFunc(p.Classes, func(o Class) bool { return o.Name == c.Name }) {
		t.fault("name", "%q is the name of another class, too", c.Name)
	}
	switch how := t.text("on_admission_failure", "closed"); how {
	case "open", "closed":
		c.FailOpen = how == "open"
	default:
		t.fault("on_admission_failure", "%q is neither open nor closed", how)
	}
	matches := t.tables("match")
	for i, m := range matches {
		c.Match = append(c.Match, m.match(c.Name, i, p))
	}
	if list, ok := t.has["match"].([]any); ok && len(list) == 0 {
		t.fault("match", "is empty: leave it out to match every request")
	}
	t.done()
	return c
}

func (t *table) match(class string, i int, p *Policy) Match {
	m := Match{Tenant: t.text("tenant", ""), Path: t.text("path", "")}
	var rule []string
	if m.Tenant != "" {
		rule = append(rule, fmt.Sprintf("tenant %q", m.Tenant))
	}
	if t.has["path"] != nil {
		t.prefix(m.Path)
		rule = append(rule, fmt.Sprintf("path %q", m.Path))
	}
	if header := t.text("header", ""); header != "" {
		name, value, ok := strings.Cut(header, ":")
		m.Header, m.Value = textproto.CanonicalMIMEHeaderKey(strings.TrimSpace(name)), strings.TrimSpace(value)
		if !ok || m.Header == "" {
			t.fault("header", `%q is not of the form "Name: value"`, header)
		} else if !t.trusted[m.Header] {
			p.Warnings = append(p.Warnings, fmt.Sprintf("line %d: %s never holds: trusted_headers does not list %s", t.line, t.name, m.Header))
		}
		rule = append(rule, fmt.Sprintf("header %q", m.Header+": "+m.Value))
	}
	if len(rule) == 0 {
		t.fault("", "names no tenant, path or header")
	}
	m.rule = fmt.Sprintf("match %d of class %q: %s", i+1, class, strings.Join(rule, " and "))
	t.done()
	return m
}

// resources returns the names of all, sorted.
func (r *reader) resources(servers, costs []*table) []string {
	var names []string
	for _, t := range slices.Concat(servers, costs) {
		names = append(names, slices.Sorted(maps.Keys(t.has))...)
	}
	slices.Sort(names)
	names = slices.DeleteFunc(slices.Compact(names), func(n string) bool { return n == "url" || n == "path" })
	for _, t := range slices.Concat(servers, costs) {
		for _, n := range names {
			if t.has[n] != nil && (len(n) > 32 || strings.Trim(n, "abcdefghijklmnopqrstuvwxyz0123456789_") != "") {
				t.fault(n, "a resource has a name of at most 32 letters a-z, digits and _")
			}
		}
	}
	if len(names) > maxResources {
		r.faults = append(r.faults, fmt.Errorf("%d resources, more than %d: %.200q", len(names), maxResources, names))
	}
	return names
}
