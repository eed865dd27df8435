package profile

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/srtm-io/srtm/gateway/policy"
)

// Config is what is measured.
type Config struct {
	Server  *url.URL // of the web server, which nobody else should use meanwhile
	Monitor string   // URL of the Monitor beside it
	URLs    []string // to measure; none: those of Sitemap, or what links lead to from Server
	Sitemap string   // URL
	Repeat  int      // how often each is asked for, at each number at once
	Client  *http.Client
}

const (
	maxPages  = 200
	maxPage   = 4 << 20 // bytes of a page that are looked at for links
	maxAtOnce = 64      // requests, to saturate the server
	gain      = 1.05    // of throughput by twice as many at once: else it is saturated
)

// Result is what requests take, and what the server has.
type Result struct {
	Costs    map[string]Usage // units of a request, by path
	Capacity Usage            // units a second
	Warnings []string
}

var (
	hrefs = regexp.MustCompile(`(?i)href\s*=\s*["']([^"'#]+)`)
	locs  = regexp.MustCompile(`<loc>\s*([^<\s]+)\s*</loc>`)
)

// Run measures: each URL by itself, one request after the other, then two and four at
// once, which should cost the same each; then all together, ever more at once, until
// the server does no more.
func Run(ctx context.Context, cfg Config) (*Result, error) {
	r := &Result{Costs: map[string]Usage{}, Capacity: Usage{}}
	paths, err := cfg.paths(ctx)
	if err != nil {
		return nil, err
	}
	if len(paths) == 0 {
		return nil, errors.New("profile: there is nothing to measure")
	}
	for _, path := range paths {
		alone, err := cfg.measure(ctx, 1, path)
		if err != nil {
			return nil, err
		}
		r.Costs[path] = alone.each
		for _, together := range []int{2, 4} {
			m, err := cfg.measure(ctx, together, path)
			if err != nil {
				return nil, err
			}
			for _, name := range slices.Sorted(maps.Keys(alone.each)) {
				if a, b := alone.each[name], m.each[name]; math.Abs(a-b) > 0.2*max(a, b) {
					r.Warnings = append(r.Warnings, fmt.Sprintf("%s takes %.3g of %s alone, and %.3g with %d at once", path, a, name, b, together))
				}
			}
		}
	}
	before := 0.0
	for together := 4; together <= maxAtOnce; together *= 2 {
		m, err := cfg.measure(ctx, together, paths...)
		if err != nil {
			return nil, err
		}
		for name, rate := range m.rate {
			r.Capacity[name] = max(r.Capacity[name], rate)
		}
		if m.requests < gain*before {
			break
		}
		before = m.requests
	}
	return r, nil
}

// measured is what some requests took.
type measured struct {
	each, rate Usage   // of one request; a second
	requests   float64 // a second
}

// measure asks for paths in turn, so many at once, Repeat times each in all.
func (c *Config) measure(ctx context.Context, together int, paths ...string) (m measured, err error) {
	n := max(c.Repeat*len(paths), together)
	before, err := c.usage(ctx)
	if err != nil {
		return m, err
	}
	began := time.Now()
	group, asking := errgroup.WithContext(ctx)
	group.SetLimit(together)
	for i := range n {
		group.Go(func() error {
			_, err := c.get(asking, paths[i%len(paths)])
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return m, err
	}
	took := time.Since(began).Seconds()
	after, err := c.usage(ctx)
	if err != nil {
		return m, err
	}
	m = measured{Usage{}, Usage{}, float64(n) / took}
	for name, v := range after {
		used := max(v-before[name], 0)
		m.each[name], m.rate[name] = used/float64(n), used/took
	}
	return m, nil
}

// paths returns the paths to measure.
func (c *Config) paths(ctx context.Context) ([]string, error) {
	seen := map[string]bool{}
	var found []string
	add := func(link string, from *url.URL) {
		u, err := from.Parse(strings.TrimSpace(link))
		if err != nil || u.Host != c.Server.Host || u.Scheme != c.Server.Scheme || len(found) == maxPages {
			return
		}
		path := u.EscapedPath()
		if path = "/" + strings.TrimPrefix(path, "/"); !seen[path] {
			seen[path] = true
			found = append(found, path)
		}
	}
	for _, u := range c.URLs {
		add(u, c.Server)
	}
	switch {
	case len(c.URLs) > 0:
	case c.Sitemap != "":
		text, err := c.get(ctx, c.Sitemap)
		if err != nil {
			return nil, err
		}
		for _, loc := range locs.FindAllSubmatch(text, maxPages) {
			add(string(loc[1]), c.Server)
		}
	default:
		add("/", c.Server)
		for i := 0; i < len(found); i++ { // it grows meanwhile
			text, err := c.get(ctx, found[i])
			if errors.As(err, new(statusError)) && i > 0 { // a broken link
				found = slices.Delete(found, i, i+1)
				i--
				continue
			}
			if err != nil {
				return nil, err
			}
			for _, href := range hrefs.FindAllSubmatch(text, -1) {
				add(string(href[1]), c.Server.JoinPath(found[i]))
			}
		}
	}
	return found, nil
}

func (c *Config) usage(ctx context.Context) (u Usage, err error) {
	text, err := c.get(ctx, c.Monitor)
	if err == nil {
		err = json.Unmarshal(text, &u)
	}
	if err != nil {
		return nil, fmt.Errorf("profile: the monitor: %w", err)
	}
	return u, nil
}

// get asks for a URL, or for a path of the server, and returns the beginning.
func (c *Config) get(ctx context.Context, ref string) (_ []byte, err error) {
	u, err := c.Server.Parse(ref)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, err
	}
	res, err := c.Client.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, res.Body.Close()) }()
	text, err := io.ReadAll(io.LimitReader(res.Body, maxPage))
	if err == nil {
		_, err = io.Copy(io.Discard, res.Body)
	}
	if err == nil && res.StatusCode >= http.StatusBadRequest {
		err = statusError(fmt.Sprintf("profile: %s: %s", u, res.Status))
	}
	return text, err
}

// statusError is an answer that is none.
type statusError string

func (e statusError) Error() string { return string(e) }

// Write writes the costs as a policy has them. Capacities and warnings are comments:
// which servers there are is the operator's to say.
func (r *Result) Write(w io.Writer) error {
	var b strings.Builder
	for _, warning := range r.Warnings {
		fmt.Fprintf(&b, "# %s\n", warning)
	}
	b.WriteString("# [[server]] of this kind, in units a second:\n")
	for _, name := range slices.Sorted(maps.Keys(r.Capacity)) {
		fmt.Fprintf(&b, "# %s = %.4g\n", name, r.Capacity[name])
	}
	// Of several that a path begins with, the first one counts.
	paths := slices.SortedFunc(maps.Keys(r.Costs), func(a, b string) int { return cmp.Or(len(b)-len(a), strings.Compare(a, b)) })
	for _, path := range paths {
		units := maps.Clone(r.Costs[path])
		maps.DeleteFunc(units, func(_ string, u float64) bool { return !(u > 0) })
		if len(units) == 0 {
			continue
		}
		plain, err := url.PathUnescape(path) // as the policy has it
		if err != nil {
			return err
		}
		cost := fmt.Sprintf("\n[[cost]]\npath = %q\n", plain)
		for _, name := range slices.Sorted(maps.Keys(units)) {
			cost += fmt.Sprintf("%s = %.4g\n", name, units[name])
		}
		if _, err := policy.Parse([]byte(cost)); err != nil { // one such page would spoil the file
			cost = fmt.Sprintf("\n# no policy can name %q, or its cost\n", plain)
		}
		b.WriteString(cost)
	}
	_, err := io.WriteString(w, b.String())
	return err
}
