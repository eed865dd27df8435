//go:build linux

// Package scale measures the control plane at size (make scale): a real loaddistributor
// with its store in a file, a tbadaptor and brokers, with as many topics as the machine can
// hold. The package prints a Markdown page. BenchmarkScale in loaddistributor/placement
// measures the deciding packages without processes, at larger sizes.
package scale

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/bench/host"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/topics"
)

const (
	creators    = 16  // topics created concurrently
	each        = 100 // publishers per topic
	mcap        = 5e6 // per broker, msg/s
	callRate    = 200 // calls per second, while topics are idle
	callTimeout = time.Minute
)

type config struct {
	bin, data       string
	brokers, topics int
	largest         int
	idle            time.Duration
	stderr          io.Writer
}

// bench is a cluster under test, with the results.
type bench struct {
	config
	cluster *local.Cluster
	admin   srtmv1.AdminServiceClient
	created int // number of topics
	rows    [][2]string
}

// Run prints the page about the control plane.
func Run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	c := config{stderr: stderr}
	fs := flag.NewFlagSet("scale", flag.ContinueOnError)
	fs.StringVar(&c.bin, "bin-dir", "bin", "`folder` of the binaries (make build)")
	fs.StringVar(&c.data, "data", "", "`folder` for data and logs, which are kept (default a temporary one)")
	fs.IntVar(&c.brokers, "brokers", 4, "`number` of brokers")
	fs.IntVar(&c.topics, "topics", 10_000, "`number` of topics, of 100 publishers each")
	fs.IntVar(&c.largest, "largest", 1_000_000, "publishers of one topic more, at 1 msg/s each, at most 1,000,000")
	fs.DurationVar(&c.idle, "idle", 20*time.Second, "how long nothing is done, at 600 topics and at all")
	if err := host.Parse(fs, args, stdout); err != nil {
		return host.Usage(err)
	}
	return c.run(ctx, stdout)
}

func (c config) run(ctx context.Context, out io.Writer) (err error) {
	dir := c.data
	if dir == "" {
		if dir, err = os.MkdirTemp("", "bench-scale-"); err != nil {
			return err
		}
		defer os.RemoveAll(dir)
	}
	b := &bench{config: c}
	b.cluster, err = local.StartCluster(ctx, local.ClusterConfig{
		Brokers: c.brokers, Mcap: mcap, BinDir: c.bin, LogDir: dir, StartTimeout: 30 * time.Second,
		BrokerFlags:          []string{"--log-level=warn"},
		LoaddistributorFlags: []string{"--store=bbolt", "--data-path=" + dir, "--log-level=warn", "--fitting=off", "--rebalance=off"},
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.cluster.Stop()) }()
	b.admin = srtmv1.NewAdminServiceClient(b.cluster.Conn)
	b.logf("%d brokers have joined", c.brokers)
	for _, upTo := range []int{min(600, c.topics), c.topics} {
		if err := b.create(ctx, upTo); err != nil {
			return err
		}
		if err := b.rest(ctx); err != nil {
			return err
		}
	}
	if err := b.large(ctx); err != nil {
		return err
	}
	if err := b.cluster.Died(); err != nil {
		return err
	}
	return b.page(ctx, out)
}

func (b *bench) logf(format string, args ...any) { fmt.Fprintf(b.stderr, format+"\n", args...) }

// addRow adds a row to the table.
func (b *bench) addRow(title, format string, args ...any) {
	b.rows = append(b.rows, [2]string{title, fmt.Sprintf(format, args...)})
	b.logf("%s: "+format, append([]any{title}, args...)...)
}

// create creates topics until there are upTo.
func (b *bench) create(ctx context.Context, upTo int) error {
	first, start, latency := b.created, time.Now(), histogram.NewLatency()
	before, err := b.process(ctx, b.cluster.Lookup)
	if err != nil {
		return err
	}
	creating, all := errgroup.WithContext(ctx)
	creating.SetLimit(creators)
	var mu sync.Mutex // guards latency
	for i := first; i < upTo && all.Err() == nil; i++ {
		creating.Go(func() error {
			start := time.Now()
			if err := b.topic(all, fmt.Sprintf("t%06d", i), each); err != nil {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			latency.Record(time.Since(start))
			if i%1000 == 999 {
				b.logf("%d of %d topics", i+1, b.topics)
			}
			return nil
		})
	}
	if err := creating.Wait(); err != nil {
		return fmt.Errorf("create topics: %w", err)
	}
	b.created = upTo
	after, err := b.process(ctx, b.cluster.Lookup)
	if err != nil {
		return err
	}
	n := float64(upTo - first)
	b.addRow(fmt.Sprintf("topics %d to %d created, %d at a time", first+1, upTo, creators), "%.1f s, %.0f a second; p50 %.1f ms, p99 %.1f ms; CPU of the loaddistributor %.2f ms each",
		time.Since(start).Seconds(), n/time.Since(start).Seconds(), ms(latency.Quantile(.5)), ms(latency.Quantile(.99)), (after.cpu-before.cpu)*1000/n)
	return nil
}

// topic creates a topic and waits until the topic is active.
func (b *bench) topic(ctx context.Context, name string, publishers int) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	t, err := topics.Create(ctx, b.admin, &srtmv1.CreateTopicRequest{Spec: &srtmv1.TopicSpec{
		Name:     name,
		Contract: &srtmv1.Contract{RateMilli: int64(publishers) * 1100, Burst: int64(publishers), Slo: &srtmv1.Slo{Quantile: .99, Latency: durationpb.New(10 * time.Millisecond)}},
		Groups:   []*srtmv1.PublisherGroup{{Key: "g", Count: int32(publishers), Rate: 1}},
	}}, nil)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if t.State != srtmv1.TopicState_TOPIC_STATE_ACTIVE {
		return fmt.Errorf("%s is %v: %s", name, t.State, t.Reason)
	}
	return nil
}

// rest measures the idle cluster, then lists one topic repeatedly. The latency of the calls
// includes the wait for locks.
func (b *bench) rest(ctx context.Context) error {
	before, err := b.process(ctx, b.cluster.Lookup)
	adaptorBefore, err2 := b.process(ctx, b.cluster.Adaptor)
	if err := errors.Join(err, err2); err != nil {
		return err
	}
	start := time.Now()
	if !clock.Sleep(ctx, b.idle) {
		return ctx.Err()
	}
	after, err := b.process(ctx, b.cluster.Lookup)
	adaptor, err2 := b.process(ctx, b.cluster.Adaptor)
	if err := errors.Join(err, err2); err != nil {
		return err
	}
	percent := 100 / time.Since(start).Seconds()
	latency := histogram.NewLatency()
	start = time.Now()
	for i := range int(b.idle.Seconds() * callRate) {
		due := start.Add(time.Duration(i) * time.Second / callRate)
		if !clock.Sleep(ctx, time.Until(due)) {
			return ctx.Err()
		}
		if _, err := b.admin.ListTopics(ctx, &srtmv1.ListTopicsRequest{PageSize: 1}); err != nil {
			return err
		}
		latency.Record(time.Since(due))
	}
	b.addRow(fmt.Sprintf("%d idle topics", b.created), "CPU of the loaddistributor %.1f %% of a core, of the tbadaptor %.1f %%; %.0f and %.0f MB; a call, %d a second, is answered after p50 %.2f ms, p99 %.2f ms, p99.9 %.2f ms",
		(after.cpu-before.cpu)*percent, (adaptor.cpu-adaptorBefore.cpu)*percent, after.bytes/1e6, adaptor.bytes/1e6, callRate, ms(latency.Quantile(.5)), ms(latency.Quantile(.99)), ms(latency.Quantile(.999)))
	return nil
}

// large creates the largest topic and moves some of its publishers.
func (b *bench) large(ctx context.Context) error {
	start := time.Now()
	if err := b.topic(ctx, "largest", b.largest); err != nil {
		return err
	}
	b.addRow(fmt.Sprintf("a topic of %d publishers created", b.largest), "%.2f s", time.Since(start).Seconds())
	largest, err := b.admin.GetTopic(ctx, &srtmv1.GetTopicRequest{Name: "largest", OmitPublishers: true})
	if err != nil {
		return err
	}
	all, err := b.admin.ListBrokers(ctx, &srtmv1.ListBrokersRequest{})
	if err != nil {
		return err
	}
	target := ""
	for _, broker := range all.Brokers {
		if broker.Id != largest.Topic.Quotas[0].BrokerId {
			target = broker.Id
		}
	}
	latency := histogram.NewLatency()
	const moves = 20
	for i := range moves {
		start := time.Now()
		if _, err := b.admin.MovePublishers(ctx, &srtmv1.MovePublishersRequest{Topic: "largest", PublisherIds: []string{fmt.Sprint("g.", i)}, BrokerId: target}); err != nil {
			return fmt.Errorf("move a publisher to %s: %w", target, err)
		}
		latency.Record(time.Since(start))
	}
	after, err := b.process(ctx, b.cluster.Lookup)
	if err != nil {
		return err
	}
	b.addRow(fmt.Sprintf("one of them moved to another broker, %d times", moves), "p50 %.0f ms, most %.0f ms; %.0f MB", ms(latency.Quantile(.5)), ms(latency.Quantile(1)), after.bytes/1e6)
	return nil
}

// used is a process's CPU time in seconds and its memory in bytes.
type used struct{ cpu, bytes float64 }

func (b *bench) process(ctx context.Context, address string) (u used, err error) {
	all, err := host.Metrics(ctx, address)
	for name, target := range map[string]*float64{"process_cpu_seconds_total": &u.cpu, "process_resident_memory_bytes": &u.bytes} {
		v, exists := all[name]
		if !exists && err == nil {
			err = fmt.Errorf("%s has no metric %s", address, name)
		}
		*target = v
	}
	return u, err
}

// page prints the measurements.
func (b *bench) page(ctx context.Context, out io.Writer) error {
	var text strings.Builder
	fmt.Fprintf(&text, `# The control plane at size

Written by `+"`bench scale`"+` (make scale): do not edit. %s.

## Real processes

A loaddistributor whose store is a file, a tbadaptor and %d brokers, by gRPC; each topic
has %d publishers, and nothing is sent. The processors are shared by all.

| what | measured |
| --- | --- |
`, host.Machine(ctx), b.brokers, each)
	for _, row := range b.rows {
		fmt.Fprintf(&text, "| %s | %s |\n", row[0], row[1])
	}
	_, err := io.WriteString(out, text.String())
	return err
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
