// Command admission measures admission's decisions beside bare servers and what others
// use in its place (make bench-admission), in one run, and prints a table in Markdown.
// What is not installed is left out, saying so.
package main

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
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/srtm-io/srtm/bench/decide"
	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/obs"
)

func main() {
	if err := decide.Serve(os.Args); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(lifecycle.Main("admission", func(ctx context.Context) error { return run(ctx, os.Args[1:], os.Stdout) }))
}

// subject is one line of the table.
type subject struct {
	name   string
	server *decide.Server
	err    error // of its start
	ask    func(*decide.Server) (decide.Result, error)
	rounds []decide.Result
}

// target is a ratio of two lines of the table.
type target struct {
	what, of, to string
	column       int
	limit        float64
}

func run(ctx context.Context, args []string, out io.Writer) error {
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
	if err := fs.Parse(args); err != nil {
		return lifecycle.UsageError{Err: err}
	}
	kept, err := regexp.Compile(*only)
	if err != nil {
		return lifecycle.UsageError{Err: err}
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
		return fill(ctx, out, path, dir, *keys, decide.Load{Rate: *udpRate, Length: *length, Connections: *connections}, *limit)
	}
	udp := func(l decide.Load, echo bool) func(*decide.Server) (decide.Result, error) {
		return func(s *decide.Server) (decide.Result, error) { return decide.UDP(s, l, echo) }
	}
	evalsha := func(l decide.Load) func(*decide.Server) (decide.Result, error) {
		return func(s *decide.Server) (decide.Result, error) { return decide.EVALSHA(s, l) }
	}
	web := func(path string) func(*decide.Server) (decide.Result, error) {
		return func(s *decide.Server) (decide.Result, error) { return decide.HTTP(s, *httpRate, *length, path) }
	}
	echo, err1 := decide.Bare("udp")
	bare, err2 := decide.Bare("http")
	asked, routed, err3 := decide.Admission(ctx, path, dir, decide.Generous(), "--udp-loops=1", "--attempts=1000")
	redis, err4 := decide.Redis(dir)
	nginx, err5 := decide.Nginx(dir)
	haproxy, err6 := decide.HAProxy(dir, "")
	subjects := []*subject{
		{name: "UDP echo", server: echo, err: err1, ask: udp(pool, true)},
		{name: "admission, UDP", server: asked, err: err3, ask: udp(pool, false)},
		{name: "Redis, GCRA by EVALSHA", server: redis, err: err4, ask: evalsha(pool)},
		{name: "UDP echo, pipelined", server: echo, err: err1, ask: udp(pipe, true)},
		{name: "admission, UDP, pipelined", server: asked, err: err3, ask: udp(pipe, false)},
		{name: "Redis, pipelined", server: redis, err: err4, ask: evalsha(pipe)},
		{name: "net/http handler", server: bare, err: err2, ask: web("/qos?key=%s")},
		{name: "admission, /qos", server: routed, err: err3, ask: web("/qos?key=%s")},
		{name: "nginx, limit_req", server: nginx, err: err5, ask: web("/?key=%s")},
		{name: "HAProxy, stick table", server: haproxy, err: err6, ask: web("/?key=%s")},
	}
	targets := []target{
		{"UDP p50 to the echo's", "admission, UDP", "UDP echo", 0, 1.3}, {"UDP p99 to the echo's", "admission, UDP", "UDP echo", 1, 1.5}, {"UDP CPU to the echo's", "admission, UDP", "UDP echo", 3, 1.5},
		{"UDP p99 to Redis'", "admission, UDP", "Redis, GCRA by EVALSHA", 1, .7}, {"UDP CPU to Redis'", "admission, UDP", "Redis, GCRA by EVALSHA", 3, .5},
		{"p50 to the echo's, pipelined", "admission, UDP, pipelined", "UDP echo, pipelined", 0, 1.3}, {"p99 to the echo's, pipelined", "admission, UDP, pipelined", "UDP echo, pipelined", 1, 1.5}, {"CPU to the echo's, pipelined", "admission, UDP, pipelined", "UDP echo, pipelined", 3, 1.5},
		{"p99 to Redis', pipelined", "admission, UDP, pipelined", "Redis, pipelined", 1, .7}, {"CPU to Redis', pipelined", "admission, UDP, pipelined", "Redis, pipelined", 3, .5},
		{"/qos p50 to the handler's", "admission, /qos", "net/http handler", 0, 1.4},
	}
	if len(rates) > 0 {
		subjects, targets = nil, nil
		for _, rate := range rates {
			l := decide.Load{Rate: rate, Length: *length, Connections: *connections}
			bare, ours, theirs := fmt.Sprintf("%.0f/s: UDP echo", rate), fmt.Sprintf("%.0f/s: admission, UDP", rate), fmt.Sprintf("%.0f/s: Redis", rate)
			subjects = append(subjects, &subject{name: bare, server: echo, err: err1, ask: udp(l, true)},
				&subject{name: ours, server: asked, err: err3, ask: udp(l, false)}, &subject{name: theirs, server: redis, err: err4, ask: evalsha(l)})
			targets = append(targets, target{ours + ", p99 to Redis'", ours, theirs, 1, .7}, target{ours + ", CPU to Redis'", ours, theirs, 3, .5})
		}
	}
	var stops []error
	defer func() {
		for _, s := range []*decide.Server{echo, bare, asked, redis, nginx, haproxy} {
			if s != nil && s.Process != nil {
				stops = append(stops, s.Stop())
			}
		}
	}()
	for _, err := range []error{err1, err2, err3, err4, err5, err6} {
		if err != nil && !errors.Is(err, decide.ErrAbsent) {
			return err
		}
	}
	for _, s := range subjects {
		if s.err != nil {
			fmt.Fprintf(out, "%s: left out: %v\n", s.name, s.err)
		}
		if s.err != nil || !kept.MatchString(s.name) {
			s.server = nil
		}
	}
	for round := range *rounds + 1 { // the first warms up
		for _, s := range subjects {
			if s.server == nil {
				continue
			}
			r, err := s.ask(s.server)
			if err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
			if round > 0 {
				s.rounds = append(s.rounds, r)
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
		}
	}
	offered := fmt.Sprintf("%.0f", *udpRate)
	if len(rates) > 0 {
		offered = strings.Trim(fmt.Sprint(rates), "[]")
	}
	fmt.Fprintf(out, `%s, %d CPUs; %d rounds of %v in turn, medians; %s requests/s over UDP and to Redis, %.0f/s over HTTP.
All are asked by one schedule, from which latencies count: over %d sockets or connections with one request at a time (HTTP: 16), or pipelined over one, each request a write of its own. CPU is the server process's until the last answer. Redis keeps nothing on disk; admission makes a check-point each second.

`, obs.Version(), runtime.NumCPU(), *rounds, *length, offered, *httpRate, *connections)
	fmt.Fprintln(out, "| | p50 us | p99 us | p99.9 us | CPU us | RSS MB | unanswered |\n|---|---|---|---|---|---|---|")
	got := map[string][4]float64{}
	for _, s := range subjects {
		if s.server == nil {
			continue
		}
		quantile := func(q float64) float64 {
			return median(s.rounds, func(r decide.Result) float64 { return us(r.Latency.Quantile(q)) })
		}
		var lost int64
		for _, r := range s.rounds {
			lost += r.Sent - r.Answered
		}
		v := [4]float64{quantile(.5), quantile(.99), quantile(.999), median(s.rounds, func(r decide.Result) float64 { return us(r.CPU) })}
		got[s.name] = v
		fmt.Fprintf(out, "| %s | %.0f | %.0f | %.0f | %.1f | %.0f | %d |\n", s.name, v[0], v[1], v[2], v[3], median(s.rounds, func(r decide.Result) float64 { return float64(r.RSS) / (1 << 20) }), lost)
	}
	fmt.Fprintln(out, "\n| ratio | is | target | kept |\n|---|---|---|---|")
	for _, t := range targets {
		of, there := got[t.of]
		to, beside := got[t.to]
		if !there || !beside {
			continue
		}
		ratio := of[t.column] / to[t.column]
		met := "yes"
		if ratio > t.limit {
			met = "no"
		}
		fmt.Fprintf(out, "| %s | %.2f | <= %.1f | %s |\n", t.what, ratio, t.limit, met)
	}
	return errors.Join(stops...)
}

func us(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

func median(rounds []decide.Result, of func(decide.Result) float64) float64 {
	values := make([]float64, len(rounds))
	for i, r := range rounds {
		values[i] = of(r)
	}
	slices.Sort(values)
	return values[len(values)/2]
}
