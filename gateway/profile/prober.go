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

// Config configures a measurement.
type Config struct {
	Server  *url.URL // the web server; it should have no other clients meanwhile
	Monitor string   // URL of the server's Monitor
	URLs    []string // to measure; none: the URLs of Sitemap, or all links reachable from Server
	Sitemap string   // URL
	Repeat  int      // requests of each URL, at each concurrency
	Client  *http.Client
}

const (
	maxPages  = 200
	maxPage   = 4 << 20 // bytes of a page searched for links
	maxAtOnce = 64      // concurrent requests to saturate the server
	gain      = 1.05    // minimum gain of throughput when concurrency doubles; below it the server is saturated
)

// Result is the cost of requests and the capacity of the server.
type Result struct {
	Costs    map[string]Usage // units per request, by path
	Capacity Usage            // units per second
	Warnings []string
}

var (
	hrefs = regexp.MustCompile(`(?i)href\s*=\s*["']([^"'#]+)`)
	locs  = regexp.MustCompile(`<loc>\s*([^<\s]+)\s*</loc>`)
)

// Run measures each URL alone: one request after the other, then two and four at once, which should
// cost the same each. Then Run requests all URLs together with growing concurrency, until the
// throughput no longer grows.
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
		for _, together := range []int{1, 2, 4} {
			usage, _, err := cfg.measure(ctx, together, path)
			if err != nil {
				return nil, err
			}
			if together == 1 {
				r.Costs[path] = usage
			}
			alone := r.Costs[path]
			for _, name := range slices.Sorted(maps.Keys(alone)) {
				if a, b := alone[name], usage[name]; math.Abs(a-b) > 0.2*max(a, b) {
					r.Warnings = append(r.Warnings, fmt.Sprintf("%s takes %.3g of %s alone, and %.3g with %d at once", path, a, name, b, together))
				}
			}
		}
	}
	last := math.Inf(1) // seconds
	for together := 4; together <= maxAtOnce; together *= 2 {
		usage, seconds, err := cfg.measure(ctx, together, paths...)
		if err != nil {
			return nil, err
		}
		for name, used := range usage {
			r.Capacity[name] = max(r.Capacity[name], used/seconds)
		}
		if gain*seconds > last {
			break
		}
		last = seconds
	}
	return r, nil
}

// measure requests paths in turn, together at a time, Repeat times each in all. It returns the usage
// per request, and the elapsed time divided by the number of requests.
func (c *Config) measure(ctx context.Context, together int, paths ...string) (usage Usage, seconds float64, err error) {
	n := max(c.Repeat*len(paths), together)
	first, err := c.usage(ctx)
	if err != nil {
		return nil, 0, err
	}
	start := time.Now()
	group, asking := errgroup.WithContext(ctx)
	group.SetLimit(together)
	for i := range n {
		group.Go(func() error {
			_, err := c.get(asking, paths[i%len(paths)])
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return nil, 0, err
	}
	seconds = time.Since(start).Seconds() / float64(n)
	usage, err = c.usage(ctx)
	for name := range usage {
		usage[name] = max(usage[name]-first[name], 0) / float64(n)
	}
	return usage, seconds, err
}

// paths returns the paths to measure.
func (c *Config) paths(ctx context.Context) (found []string, err error) {
	var paths []string // found, and broken links
	add := func(link string, from *url.URL) {
		u, err := from.Parse(strings.TrimSpace(link))
		if err != nil || u.Host != c.Server.Host || u.Scheme != c.Server.Scheme {
			return
		}
		if path := "/" + strings.TrimPrefix(u.EscapedPath(), "/"); !slices.Contains(paths, path) && len(paths) < maxPages {
			paths = append(paths, path)
		}
	}
	links := func(in []byte, kind *regexp.Regexp, from *url.URL) {
		for _, link := range kind.FindAllSubmatch(in, -1) {
			add(string(link[1]), from)
		}
	}
	switch {
	case len(c.URLs) > 0:
		for _, u := range c.URLs {
			add(u, c.Server)
		}
		return paths, nil
	case c.Sitemap != "":
		text, err := c.get(ctx, c.Sitemap)
		links(text, locs, c.Server)
		return paths, err
	}
	add("/", c.Server)
	for i := 0; i < len(paths); i++ { // known grows in the loop
		text, err := c.get(ctx, paths[i])
		if errors.As(err, new(statusError)) && i > 0 {
			continue
		}
		if err != nil {
			return nil, err
		}
		found = append(found, paths[i])
		links(text, hrefs, c.Server.JoinPath(paths[i]))
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

// get requests a URL, or a path of the server, and returns the first maxPage bytes of the answer.
func (c *Config) get(ctx context.Context, ref string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, ref, nil)
	if err != nil {
		return nil, err
	}
	req.URL = c.Server.ResolveReference(req.URL)
	res, err := c.Client.Do(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	text, err := io.ReadAll(io.LimitReader(res.Body, maxPage))
	if err == nil {
		_, err = io.Copy(io.Discard, res.Body)
	}
	if err == nil && res.StatusCode >= http.StatusBadRequest {
		err = statusError(fmt.Sprintf("profile: %s: %s", req.URL, res.Status))
	}
	return text, err
}

// statusError is an error status of an answer.
type statusError string

func (e statusError) Error() string { return string(e) }

// Write writes the costs in the form of a policy. Capacities and warnings become comments, because the
// operator lists the servers.
func (r *Result) Write(w io.Writer) error {
	var b strings.Builder
	for _, warning := range r.Warnings {
		fmt.Fprintf(&b, "# %s\n", warning)
	}
	b.WriteString("# [[server]] of this kind, in units a second:\n")
	for _, name := range slices.Sorted(maps.Keys(r.Capacity)) {
		fmt.Fprintf(&b, "# %s = %.4g\n", name, r.Capacity[name])
	}
	// The first [[cost]] whose path is a prefix applies, so longer paths come first.
	paths := slices.SortedFunc(maps.Keys(r.Costs), func(a, b string) int { return cmp.Or(len(b)-len(a), strings.Compare(a, b)) })
	for _, path := range paths {
		plain, err := url.PathUnescape(path) // unescaped, as in a policy
		if err != nil {
			return err
		}
		units, cost := r.Costs[path], ""
		for _, name := range slices.Sorted(maps.Keys(units)) {
			if units[name] > 0 {
				cost += fmt.Sprintf("%s = %.4g\n", name, units[name])
			}
		}
		if cost == "" {
			continue
		}
		cost = fmt.Sprintf("\n[[cost]]\npath = %q\n%s", plain, cost)
		if _, err := policy.Parse([]byte(cost)); err != nil { // one such page would spoil the file
			cost = fmt.Sprintf("\n# no policy can name %q, or its cost\n", plain)
		}
		b.WriteString(cost)
	}
	_, err := io.WriteString(w, b.String())
	return err
}
