// Package admission compares admission's decisions with bare servers and with common
// alternatives in one run (make bench-admission), and prints a Markdown table. Programs
// that are not installed are reported and left out.
package admission

import (
	"context"
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
	"github.com/srtm-io/srtm/bench/host"
	"github.com/srtm-io/srtm/internal/program"
)

// columns are the columns of the table.
var columns = host.Table[decide.Result]{
	quantile("p50 us", .5), quantile("p99 us", .99), quantile("p99.9 us", .999),
	host.Figure("CPU us", "%.1f", cpu),
	{Title: "RSS MB", Format: "%.0f", Value: func(r decide.Result) (float64, bool) { return float64(r.RSS) / (1 << 20), r.RSS > 0 }},
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

// targets are upper bounds on the ratio of admission's metrics to other servers' metrics.
var targets = []host.Target[decide.Result]{
	host.Ratio("UDP CPU to the floor's", "admission, UDP", "UDP floor", cpu, 1.5),
	host.Ratio("UDP CPU to Redis'", "admission, UDP", "Redis, GCRA by EVALSHA", cpu, .5),
	host.Ratio("CPU to the floor's, pipelined", "admission, UDP, pipelined", "UDP floor, pipelined", cpu, 1.5),
	host.Ratio("CPU to Redis', pipelined", "admission, UDP, pipelined", "Redis, pipelined", cpu, .5),
	host.Ratio("/qos p50 to the handler's", "admission, /qos", "net/http handler", latency(.5), 1.4),
}

// slower is a target for the part of the rounds in which one server's p99 is above another's.
func slower(what, ours, theirs string) host.Target[decide.Result] {
	return host.Target[decide.Result]{What: what, Format: "%.2f", Limit: .1, Value: func(results map[string][]decide.Result) (part float64, known bool) {
		a, b := results[ours], results[theirs]
		for i := range min(len(a), len(b)) {
			if p99 := latency(.99); p99(a[i]) > p99(b[i]) {
				part++
			}
		}
		return part / float64(max(1, len(a))), len(a) > 0 && len(a) == len(b)
	}}
}

// Run prints the cost of decisions.
func Run(ctx context.Context, args []string, out, _ io.Writer) error {
	fs := flag.NewFlagSet("admission", flag.ContinueOnError)
	bin := fs.String("bin-dir", "bin", "`folder` of admission")
	rounds := fs.Int("rounds", 5, "number of measurements of each server, in turn")
	length := fs.Duration("duration", 1500*time.Millisecond, "length of each measurement")
	udpRate := fs.Float64("rate", 5000, "requests `per second` over UDP and to Redis")
	httpRate := fs.Float64("http-rate", 2000, "requests `per second` over HTTP")
	var rates []float64
	fs.Func("rates", "measure UDP and Redis alone, at each of these comma-separated rates `per second` in place of --rate", func(s string) error {
		for _, text := range strings.Split(s, ",") {
			rate, err := strconv.ParseFloat(text, 64)
			if err != nil || rate <= 0 {
				return fmt.Errorf("rate %q: want numbers above 0, with commas", text)
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
	wanted, err := regexp.Compile(*only)
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
	udp := func(s *decide.Server, l decide.Load, echo bool) func(int) (decide.Result, error) {
		return func(int) (decide.Result, error) { return decide.UDP(s, l, echo) }
	}
	evalsha := func(s *decide.Server, l decide.Load) func(int) (decide.Result, error) {
		return func(int) (decide.Result, error) { return decide.EVALSHA(s, l) }
	}
	web := func(s *decide.Server, path string) func(int) (decide.Result, error) {
		return func(int) (decide.Result, error) {
			return decide.HTTP(s, decide.Load{Rate: *httpRate, Length: *length, Connections: 16}, path)
		}
	}
	floor, err1 := decide.Bare("udp")
	bare, err2 := decide.Bare("http")
	udpServer, webServer, err3 := decide.Admission(ctx, path, dir, decide.Generous(), "--udp-loops=1", "--attempts=1000")
	redis, err4 := decide.Redis(dir)
	nginx, err5 := decide.Nginx(dir, decide.NginxLimit)
	haproxy, err6 := decide.HAProxy(dir, decide.HAProxyLimit)
	defer decide.Stop(floor, bare, udpServer, redis, nginx, haproxy)
	all, goals := []host.Subject[decide.Result]{
		{Name: "UDP floor", Err: err1, Measure: udp(floor, pool, true)},
		{Name: "admission, UDP", Err: err3, Measure: udp(udpServer, pool, false)},
		{Name: "Redis, GCRA by EVALSHA", Err: err4, Measure: evalsha(redis, pool)},
		{Name: "UDP floor, pipelined", Err: err1, Measure: udp(floor, pipe, true)},
		{Name: "admission, UDP, pipelined", Err: err3, Measure: udp(udpServer, pipe, false)},
		{Name: "Redis, pipelined", Err: err4, Measure: evalsha(redis, pipe)},
		{Name: "net/http handler", Err: err2, Measure: web(bare, "/qos?key=%s")},
		{Name: "admission, /qos", Err: err3, Measure: web(webServer, "/qos?key=%s")},
		{Name: "nginx, limit_req", Err: err5, Measure: web(nginx, "/?key=%s")},
		{Name: "HAProxy, stick table", Err: err6, Measure: web(haproxy, "/?key=%s")},
	}, targets
	if len(rates) > 0 {
		all, goals = nil, nil
		for _, rate := range rates {
			l := decide.Load{Rate: rate, Length: *length, Connections: *connections}
			name := fmt.Sprintf("%.0f/s: ", rate)
			ours, theirs := name+"admission, UDP", name+"Redis"
			all = append(all, host.Subject[decide.Result]{Name: name + "UDP floor", Err: err1, Measure: udp(floor, l, true)},
				host.Subject[decide.Result]{Name: ours, Err: err3, Measure: udp(udpServer, l, false)}, host.Subject[decide.Result]{Name: theirs, Err: err4, Measure: evalsha(redis, l)})
			goals = append(goals, slower(ours+", part of the rounds with a p99 above Redis'", ours, theirs), host.Ratio(ours+", CPU to Redis'", ours, theirs, cpu, .5),
				host.Ratio(ours+", CPU to the floor's", ours, name+"UDP floor", cpu, 1.5), host.Ratio(name+"UDP floor, CPU to Redis'", name+"UDP floor", theirs, cpu, .5))
		}
	}
	all = slices.DeleteFunc(all, func(s host.Subject[decide.Result]) bool { return !wanted.MatchString(s.Name) })
	subjects, err := host.Present(out, all)
	if err != nil {
		return err
	}
	if _, err := host.Rounds(ctx, 1, subjects); err != nil { // warm-up
		return err
	}
	got, err := host.Rounds(ctx, *rounds, subjects)
	if err != nil {
		return err
	}
	offered := fmt.Sprintf("%.0f", *udpRate)
	if len(rates) > 0 {
		offered = strings.Trim(fmt.Sprint(rates), "[]")
	}
	fmt.Fprintf(out, `%s, %d CPUs; %d rounds of %v in turn, medians; %s requests/s over UDP and to Redis, %.0f/s over HTTP.
All are asked by one schedule, from which latencies count: over %d sockets or connections with one request at a time (HTTP: 16), or pipelined over one, each request a write of its own. CPU is the server process's until the last answer. Redis keeps nothing on disk; admission looks each second for what to save, which is nothing, since these keys are full again.

`, program.Version(), runtime.NumCPU(), *rounds, *length, offered, *httpRate, *connections)
	columns.Write(out, subjects, got)
	host.Judge(out, "ratio", got, goals)
	return nil
}

func us(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }
