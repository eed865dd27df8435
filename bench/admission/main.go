// Package admission measures admission's decisions beside bare servers and what others
// use in its place (make bench-admission), in one run, and prints a table in Markdown.
// What is not installed is left out, saying so.
package admission

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/srtm-io/srtm/bench/decide"
	"github.com/srtm-io/srtm/bench/host"
	"github.com/srtm-io/srtm/internal/obs"
)

// subject is one line of the table.
type subject struct {
	name   string
	server *decide.Server
	err    error // it did not start
	ask    func(*decide.Server) (decide.Result, error)
}

// columns are what is shown of a subject.
var columns = host.Table[decide.Result]{
	quantile("p50 us", .5), quantile("p99 us", .99), quantile("p99.9 us", .999),
	host.Figure("CPU us", "%.1f", cpu),
	{Title: "RSS MB", Format: "%.0f", Of: func(r decide.Result) (float64, bool) { return float64(r.RSS) / (1 << 20), r.RSS > 0 }},
	{Title: "unanswered", Text: func(rounds []decide.Result) string {
		lost := int64(0)
		for _, r := range rounds {
			lost += r.Sent - r.Answered
		}
		return fmt.Sprint(lost)
	}},
}

func quantile(title string, q float64) host.Column[decide.Result] {
	return host.Figure(title, "%.0f", latency(q))
}

func latency(q float64) func(decide.Result) float64 {
	return func(r decide.Result) float64 { return us(r.Latency.Quantile(q)) }
}

func cpu(r decide.Result) float64 { return us(r.CPU) }

// target is the most that admission may take, as a ratio to what another takes.
type target struct {
	what, of, to string
	figure       func(decide.Result) float64
	limit        float64
}

var targets = []target{
	{"UDP p50 to the echo's", "admission, UDP", "UDP echo", latency(.5), 1.3},
	{"UDP p99 to the echo's", "admission, UDP", "UDP echo", latency(.99), 1.5},
	{"UDP CPU to the echo's", "admission, UDP", "UDP echo", cpu, 1.5},
	{"UDP p99 to Redis'", "admission, UDP", "Redis, GCRA by EVALSHA", latency(.99), .7},
	{"UDP CPU to Redis'", "admission, UDP", "Redis, GCRA by EVALSHA", cpu, .5},
	{"p50 to the echo's, pipelined", "admission, UDP, pipelined", "UDP echo, pipelined", latency(.5), 1.3},
	{"p99 to the echo's, pipelined", "admission, UDP, pipelined", "UDP echo, pipelined", latency(.99), 1.5},
	{"CPU to the echo's, pipelined", "admission, UDP, pipelined", "UDP echo, pipelined", cpu, 1.5},
	{"p99 to Redis', pipelined", "admission, UDP, pipelined", "Redis, pipelined", latency(.99), .7},
	{"CPU to Redis', pipelined", "admission, UDP, pipelined", "Redis, pipelined", cpu, .5},
	{"/qos p50 to the handler's", "admission, /qos", "net/http handler", latency(.5), 1.4},
}

// Run prints what decisions cost.
func Run(ctx context.Context, args []string, out, _ io.Writer) error {
	fs := flag.NewFlagSet("admission", flag.ContinueOnError)
	bin := fs.String("bin-dir", "bin", "`folder` of admission")
	rounds := fs.Int("rounds", 5, "how often each is measured, in turn")
	length := fs.Duration("duration", 1500*time.Millisecond, "of each")
	udpRate := fs.Float64("rate", 5000, "requests `per second` over UDP and to Redis")
	httpRate := fs.Float64("http-rate", 2000, "requests `per second` over HTTP")
	var rates []float64
	fs.Func("rates", "measure UDP and Redis alone, at each of these comma-separated rates `per second` in place of --rate", func(s string) error {
		for _, text := range strings.Split(s, ",") {
			rate, err := strconv.ParseFloat(text, 64)
			if err != nil || rate <= 0 {
				return fmt.Errorf("%q is no rate", text)
			}
			rates = append(rates, rate)
		}
		return nil
	})
	connections := fs.Int("connections", 16, "sockets of UDP and connections of Redis, each with one request at a time, beside one that is pipelined")
	keys := fs.Int64("fill", 0, "fill a server with so many keys instead, and show what one takes; decisions beside it are at --rate")
	limit := fs.Duration("fill-time", 30*time.Minute, "how long to fill at most")
	only := fs.String("only", "", "leave out lines of the table whose name does not match this `expression`")
	if err := host.Parse(fs, args, out); err != nil {
		return host.Usage(err)
	}
	kept, err := regexp.Compile(*only)
	if err != nil {
		return host.Usage(err)
	}
	dir, err := os.MkdirTemp("", "bench-admission-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	path, err := filepath.Abs(*bin)
	if err != nil {
		return err
	}
	pool, pipe := decide.Load{Rate: *udpRate, Length: *length, Connections: *connections}, decide.Load{Rate: *udpRate, Length: *length, Connections: 1}
	if *keys > 0 {
		return fill(ctx, out, path, dir, *keys, pool, *limit)
	}
	udp := func(l decide.Load, echo bool) func(*decide.Server) (decide.Result, error) {
		return func(s *decide.Server) (decide.Result, error) { return decide.UDP(s, l, echo) }
	}
	evalsha := func(l decide.Load) func(*decide.Server) (decide.Result, error) {
		return func(s *decide.Server) (decide.Result, error) { return decide.EVALSHA(s, l) }
	}
	web := func(path string) func(*decide.Server) (decide.Result, error) {
		return func(s *decide.Server) (decide.Result, error) {
			return decide.HTTP(s, decide.Load{Rate: *httpRate, Length: *length, Connections: 16}, path)
		}
	}
	echo, err1 := decide.Bare("udp")
	bare, err2 := decide.Bare("http")
	asked, routed, err3 := decide.Admission(ctx, path, dir, decide.Generous(), "--udp-loops=1", "--attempts=1000")
	redis, err4 := decide.Redis(dir)
	nginx, err5 := decide.Nginx(dir, decide.NginxLimit)
	haproxy, err6 := decide.HAProxy(dir, decide.HAProxyLimit)
	defer decide.Stop(echo, bare, asked, redis, nginx, haproxy)
	all, goals := []subject{
		{"UDP echo", echo, err1, udp(pool, true)},
		{"admission, UDP", asked, err3, udp(pool, false)},
		{"Redis, GCRA by EVALSHA", redis, err4, evalsha(pool)},
		{"UDP echo, pipelined", echo, err1, udp(pipe, true)},
		{"admission, UDP, pipelined", asked, err3, udp(pipe, false)},
		{"Redis, pipelined", redis, err4, evalsha(pipe)},
		{"net/http handler", bare, err2, web("/qos?key=%s")},
		{"admission, /qos", routed, err3, web("/qos?key=%s")},
		{"nginx, limit_req", nginx, err5, web("/?key=%s")},
		{"HAProxy, stick table", haproxy, err6, web("/?key=%s")},
	}, targets
	if len(rates) > 0 {
		all, goals = nil, nil
		for _, rate := range rates {
			l := decide.Load{Rate: rate, Length: *length, Connections: *connections}
			name := fmt.Sprintf("%.0f/s: ", rate)
			ours, theirs := name+"admission, UDP", name+"Redis"
			all = append(all, subject{name + "UDP echo", echo, err1, udp(l, true)},
				subject{ours, asked, err3, udp(l, false)}, subject{theirs, redis, err4, evalsha(l)})
			goals = append(goals, target{ours + ", p99 to Redis'", ours, theirs, latency(.99), .7}, target{ours + ", CPU to Redis'", ours, theirs, cpu, .5})
		}
	}
	var subjects []subject
	for _, s := range all {
		switch {
		case errors.Is(s.err, decide.ErrAbsent):
			fmt.Fprintf(out, "%s: left out: %v\n", s.name, s.err)
		case s.err != nil:
			return s.err
		case kept.MatchString(s.name):
			subjects = append(subjects, s)
		}
	}
	ask := func(s subject, _ int) (decide.Result, error) {
		r, err := s.ask(s.server)
		if err != nil {
			err = fmt.Errorf("%s: %w", s.name, err)
		}
		return r, err
	}
	if _, err := host.Alternate(ctx, 1, subjects, ask); err != nil { // warms up
		return err
	}
	got, err := host.Alternate(ctx, *rounds, subjects, ask)
	if err != nil {
		return err
	}
	offered := fmt.Sprintf("%.0f", *udpRate)
	if len(rates) > 0 {
		offered = strings.Trim(fmt.Sprint(rates), "[]")
	}
	fmt.Fprintf(out, `%s, %d CPUs; %d rounds of %v in turn, medians; %s requests/s over UDP and to Redis, %.0f/s over HTTP.
All are asked by one schedule, from which latencies count: over %d sockets or connections with one request at a time (HTTP: 16), or pipelined over one, each request a write of its own. CPU is the server process's until the last answer. Redis keeps nothing on disk; admission looks each second for what to save, which is nothing, since these keys are full again.

`, obs.Version(), runtime.NumCPU(), *rounds, *length, offered, *httpRate, *connections)
	by, names := map[string][]decide.Result{}, []string{}
	for i, s := range subjects {
		names, by[s.name] = append(names, s.name), got[i]
	}
	columns.Write(out, names, got)
	fmt.Fprintln(out)
	host.Head(out, "ratio", "is", "target", "kept")
	for _, t := range goals {
		if of, to := by[t.of], by[t.to]; len(of) > 0 && len(to) > 0 {
			host.Judge(out, t.what, "%.2f", host.Median(of, t.figure)/host.Median(to, t.figure), t.limit)
		}
	}
	return nil
}

func us(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }
