// Package emulate performs one run of iotpub. It connects a fleet to its brokers,
// subscribes if requested, sends a load, drains, and writes the report. The packages that
// emulate combines do not know each other.
package emulate

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"math"
	"net"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/tools/iotpub/fleet"
	"github.com/srtm-io/srtm/tools/iotpub/load"
	"github.com/srtm-io/srtm/tools/iotpub/report"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/iotpub/subscriber"
)

// Config describes one run.
type Config struct {
	Load     load.Options
	Duration time.Duration
	Topic    string

	// MQTT is the MQTT address of the broker of all publishers, which may redirect them. Name is
	// the MQTT topic name, in which {id} is the publisher's ID; empty: Topic.
	MQTT, Name string
	// Nsqd is the broker of all publishers without MQTT. If Nsqd is empty, Loaddistributor places
	// the publishers.
	Nsqd            string
	Loaddistributor string
	Trust           secure.ClientConfig // for the loaddistributor

	// Subscribe receives the messages on Channel and checks them. Lookupd are the lookup
	// services that know the topic's brokers. If Lookupd is empty, the subscriber connects
	// to Nsqd.
	Subscribe bool
	Channel   string
	Lookupd   []string

	// Connect bounds the time until all are connected. Drain bounds the wait for replies,
	// and then the time without a delivery.
	Connect, Drain time.Duration

	Workers        int
	Mpub           bool
	MaxOutstanding int
	Heartbeat      time.Duration

	// Interval is the time between lines of progress; 0: none.
	Interval time.Duration
	// Capture is a file for the times of writing, one per line, in seconds from the start,
	// in drlsim's format; empty for none.
	Capture string
	// Histograms is a file for all latency counts of the run, in HdrHistogram log format;
	// empty for none.
	Histograms string
	// Background is the additional load.
	Background Background
	// Logger receives diagnostics outside the report.
	Logger *slog.Logger
}

// Validate returns every fault at once, joined, or nil. load.Options.Build reports faults
// of the load.
func (c *Config) Validate() error {
	var f faults.List
	f.If(!wire.ValidTopicName(c.Topic), "topic: %q is no valid name", c.Topic)
	f.If(c.Subscribe && !wire.ValidChannelName(c.Channel), "channel: %q is no valid name", c.Channel)
	f.If(c.Duration <= 0, "duration: %v, want more than 0", c.Duration)
	if c.MQTT == "" {
		f.If((c.Nsqd == "") == (c.Loaddistributor == ""), "want either the address of a broker or that of a loaddistributor")
		f.If(c.Name != "", "an MQTT topic name needs --protocol mqtt")
	} else {
		f.If(c.Loaddistributor != "", "brokers redirect publishers of MQTT: want no address of a loaddistributor")
		f.If(c.Mpub, "MQTT has no MPUB")
		f.If(c.Subscribe && c.Nsqd == "" && len(c.Lookupd) == 0, "subscribing needs the NSQ address of a broker, or the address of a lookupd")
		f.If(c.Heartbeat > maxKeepAlive, "heartbeat: %v, want at most %v with MQTT", c.Heartbeat, maxKeepAlive)
	}
	_, err := c.Trust.Load("")
	f.Add(err)
	f.If(c.Subscribe && c.MQTT == "" && c.Nsqd == "" && len(c.Lookupd) == 0, "subscribing needs the address of a lookupd where the loaddistributor places the publishers")
	for _, a := range slices.Concat([]string{c.MQTT, c.Nsqd, c.Loaddistributor}, c.Lookupd) {
		if a != "" {
			_, _, err := net.SplitHostPort(a)
			f.If(err != nil, "address %q: want host:port", a)
		}
	}
	f.If(c.Connect <= 0 || c.Drain <= 0, "connect timeout %v and drain timeout %v: want more than 0", c.Connect, c.Drain)
	f.If(c.Workers < 1, "workers: %d, want at least 1", c.Workers)
	f.If(c.MaxOutstanding < 1, "max outstanding: %d, want at least 1", c.MaxOutstanding)
	f.If(c.Heartbeat < time.Second, "heartbeat: %v, want at least 1s", c.Heartbeat)
	f.If(c.Interval < 0, "interval: %v, want 0 or more", c.Interval)
	f.Add(c.Background.validate(c.Topic))
	return f.Err()
}

// maxKeepAlive is the largest keep alive of CONNECT.
const maxKeepAlive = (1<<16 - 1) * time.Second

// startAfter is the time from the last connection to the schedule's zero.
const startAfter = 50 * time.Millisecond

// grace is the time to wait for duplicates after the last missing message arrived.
const grace = 200 * time.Millisecond

// maxMissing bounds the missing messages that a report lists.
const maxMissing = 20

// run is the state of one run.
type run struct {
	cfg     *Config
	load    *load.Load
	traffic *traffic
	back    *traffic // nil without a background

	mu struct {
		sync.Mutex
		brokerOf map[int32]string // brokers of the placed publishers
	}
}

// traffic is a fleet of publishers, and a subscriber of their messages.
type traffic struct {
	name    string // empty for the run's own traffic
	fleet   *fleet.Fleet
	sub     *subscriber.Subscriber // nil without a subscriber
	brokers func() int             // number of brokers for the subscriber
}

// stats returns the current stats, and the end-to-end latency, or nil without a subscriber.
func (t *traffic) stats() (fleet.Stats, *histogram.Latency) {
	s := t.fleet.Stats()
	if t.sub == nil {
		return s, nil
	}
	d := t.sub.Stats()
	s.Delivered, s.Duplicated = d.Delivered, d.Duplicated
	return s, d.EndToEnd
}

// ready waits until every publisher and the subscriber are connected.
func (t *traffic) ready(ctx context.Context) error {
	if err := t.fleet.Ready(ctx); err != nil || t.sub == nil {
		return err
	}
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for t.sub.Connections() < t.brokers() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("the subscriber is connected to %d of %s: %w", t.sub.Connections(), plural.Count(t.brokers(), "broker"), ctx.Err())
		}
	}
	return nil
}

// latencies returns the traffic's histograms.
func (t *traffic) latencies() []obs.TaggedLatency {
	prefix := ""
	if t.name != "" {
		prefix = t.name + "_"
	}
	s, endToEnd := t.stats()
	all := []obs.TaggedLatency{{Tag: prefix + "lateness", Latency: s.Lateness}, {Tag: prefix + "answer", Latency: s.Answer}}
	if endToEnd != nil {
		all = append(all, obs.TaggedLatency{Tag: prefix + "end_to_end", Latency: endToEnd})
	}
	return all
}

// Run performs a run. If ctx ends early, Run drains and reports the results so far. An
// error means that there is no report. Run calls progress, which may be nil, on its own
// goroutine.
//
// Requires: cfg is valid.
func Run(ctx context.Context, cfg Config, l *load.Load, progress func(*report.Progress)) (_ *report.Report, err error) {
	r := &run{cfg: &cfg, load: l}
	r.mu.brokerOf = map[int32]string{}
	// Open the files before any message is sent.
	captured, err := create("capture", cfg.Capture)
	defer func() { err = errors.Join(err, closed(captured)) }()
	if err != nil {
		return nil, err
	}
	histograms, err := create("histograms", cfg.Histograms)
	defer func() { err = errors.Join(err, closed(histograms)) }()
	if err != nil {
		return nil, err
	}
	id := uint32(new(maphash.Hash).Sum64()) // each Hash has a random seed
	if err := r.build(id, captured != nil); err != nil {
		return nil, err
	}
	if len(cfg.Background.At) > 0 {
		if r.back, err = newBackground(&cfg, ^id); err != nil {
			return nil, fmt.Errorf("background: %w", err)
		}
	}

	// The parts run until the end of draining, even after ctx has ended. A part that fails
	// ends the run.
	parts, end := context.WithCancelCause(context.WithoutCancel(ctx))
	var all sync.WaitGroup
	defer all.Wait()
	defer end(nil)
	part := func(name string, run func(context.Context) error) {
		all.Go(func() {
			if err := run(parts); err != nil && parts.Err() == nil {
				end(fmt.Errorf("%s: %w", name, err))
			}
		})
	}
	sent := make(chan struct{})
	part("publishers", func(ctx context.Context) error {
		defer close(sent)
		return r.traffic.fleet.Run(ctx)
	})
	if cfg.Loaddistributor != "" {
		part("placement", r.follow)
	}
	if r.traffic.sub != nil {
		part("subscriber", r.traffic.sub.Run)
	}
	if r.back != nil {
		part("background", r.back.fleet.Run)
		part("background's subscriber", r.back.sub.Run)
	}

	if err := r.connect(ctx, parts); err != nil {
		return nil, err
	}
	before := clock.CPU()
	start := clock.Mono().Add(startAfter)
	r.traffic.fleet.Start(start)
	if r.back != nil {
		r.back.fleet.Start(start)
	}
	interrupted, err := r.watch(ctx, parts, start, sent, progress)
	if err != nil {
		return nil, err
	}
	if r.back != nil {
		r.back.fleet.Stop()
	}
	stopped := clock.Mono()
	if err := r.deliver(parts); err != nil {
		return nil, err
	}
	rep := r.report(start, stopped, interrupted)
	rep.CPUSeconds = (clock.CPU() - before).Seconds()
	if captured != nil {
		if err := capture(captured, r.traffic.fleet.Captured(), start); err != nil {
			return nil, err
		}
	}
	if histograms != nil {
		latencies := r.traffic.latencies()
		if r.back != nil {
			latencies = append(latencies, r.back.latencies()...)
		}
		if err := obs.WriteLatencyLog(histograms, time.Duration(rep.Seconds*float64(time.Second)), latencies...); err != nil {
			return nil, err
		}
	}
	return rep, nil
}

// create creates the file at path, or returns nil if path is empty.
func create(what, path string) (*os.File, error) {
	if path == "" {
		return nil, nil
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	return f, nil
}

func closed(f *os.File) error {
	if f == nil {
		return nil
	}
	return f.Close()
}

// build creates the run's own traffic, with messages marked by id.
func (r *run) build(id uint32, capture bool) (err error) {
	cfg, l := r.cfg, r.load
	var sub *subscriber.Config
	if cfg.Subscribe {
		sub = &subscriber.Config{Channel: cfg.Channel, Lookupd: cfg.Lookupd}
		if len(cfg.Lookupd) == 0 {
			sub.Nsqd = []string{cfg.Nsqd}
		}
	}
	r.traffic, err = cfg.traffic(fleet.Config{Topic: cfg.Topic, Run: id, Sources: l.Sources, MQTT: cfg.MQTT != "", Name: cfg.Name, Address: cmp.Or(cfg.MQTT, cfg.Nsqd), Mpub: cfg.Mpub, Capture: capture}, l.Stream, sub)
	if err == nil {
		r.traffic.brokers = r.brokers
	}
	return err
}

// traffic creates the publishers of f, which send stream until the end of the run. traffic
// also creates a subscriber of their messages, unless sub is nil.
func (c *Config) traffic(f fleet.Config, stream func() schedule.Stream, sub *subscriber.Config) (t *traffic, err error) {
	t = &traffic{}
	f.Stream = func() schedule.Stream { return schedule.Until(stream(), c.Duration) }
	f.Workers, f.MaxOutstanding, f.Heartbeat, f.Drain = c.Workers, c.MaxOutstanding, c.Heartbeat, c.Drain
	if t.fleet, err = fleet.New(f); err != nil || sub == nil {
		return t, err
	}
	sub.Topic, sub.Run, sub.Sources, sub.Logger = f.Topic, f.Run, len(f.Sources), c.Logger
	t.sub, err = subscriber.New(*sub)
	return t, err
}

// follow passes the loaddistributor's assignments to the fleet.
func (r *run) follow(ctx context.Context) (err error) {
	options, err := r.cfg.Trust.Load("")
	if err != nil {
		return err
	}
	conn, err := service.Dial(r.cfg.Loaddistributor, options...)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	number := make(map[string]int32, len(r.load.Sources))
	for i, s := range r.load.Sources {
		number[s.ID] = int32(i)
	}
	// by id, since an open topic does not know the publishers yet
	var ids []string
	if len(r.load.Sources) <= 100_000 {
		for _, s := range r.load.Sources {
			ids = append(ids, s.ID)
		}
	}
	return client.Follow(ctx, conn, r.cfg.Topic, ids, func(all []*srtmv1.Assignment) {
		var assigned []fleet.Assignment
		r.mu.Lock()
		for _, a := range all {
			if i, ok := number[a.PublisherId]; ok && !a.Unknown {
				r.mu.brokerOf[i] = a.TcpAddress
				assigned = append(assigned, fleet.Assignment{Source: i, Address: a.TcpAddress, Epoch: a.Epoch})
			}
		}
		r.mu.Unlock()
		r.traffic.fleet.Assign(assigned)
	})
}

// brokers returns the number of brokers with a publisher.
func (r *run) brokers() int {
	if r.cfg.Nsqd != "" || r.cfg.MQTT != "" {
		return 1
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	different := map[string]bool{}
	for _, a := range r.mu.brokerOf {
		if a != "" {
			different[a] = true
		}
	}
	return len(different)
}

// connect waits until all publishers and subscribers are connected.
func (r *run) connect(ctx, parts context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Connect)
	defer cancel()
	// A failed part ends the wait.
	defer context.AfterFunc(parts, cancel)()
	err := r.traffic.ready(ctx)
	if r.mu.Lock(); err != nil && r.cfg.Loaddistributor != "" && len(r.mu.brokerOf) < len(r.load.Sources) {
		err = fmt.Errorf("%w; the loaddistributor has placed %d of them in topic %s", err, len(r.mu.brokerOf), r.cfg.Topic)
	}
	r.mu.Unlock()
	if err == nil && r.back != nil {
		if err = r.back.ready(ctx); err != nil {
			err = fmt.Errorf("background: %w", err)
		}
	}
	if cause := context.Cause(parts); err != nil && cause != nil {
		return cause
	}
	return err
}

// watch reports progress until all messages are sent and answered. If ctx ends, watch stops
// the schedule.
func (r *run) watch(ctx, parts context.Context, start mono.Time, sent <-chan struct{}, progress func(*report.Progress)) (interrupted bool, err error) {
	var ticks <-chan time.Time
	if r.cfg.Interval > 0 && progress != nil {
		ticker := time.NewTicker(r.cfg.Interval)
		defer ticker.Stop()
		ticks = ticker.C
	}
	stop := ctx.Done()
	var last report.Progress
	for {
		select {
		case <-sent:
			return interrupted, context.Cause(parts)
		case <-parts.Done():
			return interrupted, context.Cause(parts)
		case <-stop:
			interrupted, stop = true, nil
			r.traffic.fleet.Stop()
		case <-ticks:
			p := r.progress(start, &last)
			last = *p
			progress(p)
		}
	}
}

func (r *run) progress(start mono.Time, last *report.Progress) *report.Progress {
	s, endToEnd := r.traffic.stats()
	p := &report.Progress{
		Type: report.TypeProgress, ElapsedSeconds: max(0, clock.Mono().Sub(start).Seconds()), Counts: s.Counts,
		Connected: s.Connected, Lost: s.Lost, Moved: s.Moved, Lateness: report.QuantilesOf(s.Lateness),
	}
	if endToEnd != nil {
		p.EndToEnd = report.QuantilesOf(endToEnd)
	}
	if d := p.ElapsedSeconds - last.ElapsedSeconds; d > 0 {
		p.OfferedRate = float64(p.Offered-last.Offered) / d
		p.AcceptedRate = float64(p.Accepted-last.Accepted) / d
		p.DeliveredRate = float64(p.Delivered-last.Delivered) / d
	}
	return p
}

// deliver waits until every accepted message is delivered, or no message arrives for
// Config.Drain.
func (r *run) deliver(parts context.Context) error {
	if r.traffic.sub == nil {
		return nil
	}
	accepted := r.traffic.fleet.Accepted()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	delivered, since := uint64(0), clock.Mono()
	complete := false
	for {
		now := clock.Mono()
		result, _ := r.traffic.sub.Compare(accepted, 0)
		switch {
		case complete && now.Sub(since) >= grace:
			return nil
		case complete:
		case result.Lost == 0:
			complete, since = true, now
		case result.Delivered != delivered:
			delivered, since = result.Delivered, now
		case now.Sub(since) >= r.cfg.Drain:
			return nil // the report lists the missing messages
		}
		select {
		case <-tick.C:
		case <-parts.Done():
			return context.Cause(parts)
		}
	}
}

func (r *run) report(start, stopped mono.Time, interrupted bool) *report.Report {
	s, endToEnd := r.traffic.stats()
	planned := r.cfg.Duration
	if r.load.Span > 0 {
		planned = min(planned, r.load.Span)
	}
	seconds := planned.Seconds()
	if interrupted {
		seconds = min(seconds, max(0, stopped.Sub(start).Seconds()))
	}
	rep := &report.Report{
		Type: report.TypeReport, Version: program.Version(), Topic: r.cfg.Topic, Seed: r.cfg.Load.Spec.Seed,
		Load: r.load.Text, Publishers: len(r.load.Sources), Protocol: "nsq", Planned: planned.Seconds(), Seconds: seconds,
		Interrupted: interrupted, Counts: s.Counts,
		Lost: s.Lost, Moved: s.Moved, Strange: s.Strange, LastError: s.LastError,
		Lateness: report.QuantilesOf(s.Lateness), Answer: report.QuantilesOf(s.Answer),
	}
	if r.cfg.MQTT != "" {
		rep.Protocol = "mqtt"
	}
	if seconds > 0 {
		rep.OfferedRate = float64(s.Offered) / seconds
		rep.AchievedRate = float64(s.Accepted) / math.Max(seconds, s.LastAccepted.Sub(start).Seconds())
	}
	if endToEnd != nil {
		late := report.QuantilesOf(endToEnd)
		rep.EndToEnd = &late
		account, missing := r.traffic.sub.Compare(r.traffic.fleet.Accepted(), maxMissing)
		rep.Account, rep.Missing = &account, missing
	}
	if r.back != nil {
		s, endToEnd := r.back.stats()
		rep.Background = &report.Background{
			Topic: r.cfg.Background.Topic, Publishers: r.cfg.Background.publishers(), Counts: s.Counts,
			Lost: s.Lost, Lateness: report.QuantilesOf(s.Lateness), EndToEnd: report.QuantilesOf(endToEnd),
		}
		rep.Background.Held = 0
		if seconds > 0 {
			rep.Background.OfferedRate, rep.Background.AcceptedRate = float64(s.Offered)/seconds, float64(s.Accepted)/seconds
		}
	}
	return rep
}

// capture writes sorted times as seconds from start.
func capture(file *os.File, times []mono.Time, start mono.Time) error {
	slices.Sort(times)
	w := bufio.NewWriter(file)
	line := make([]byte, 0, 32)
	for _, t := range times {
		line = strconv.AppendFloat(line[:0], t.Sub(start).Seconds(), 'f', 9, 64)
		if _, err := w.Write(append(line, '\n')); err != nil {
			return fmt.Errorf("capture: %w", err)
		}
	}
	if err := w.Flush(); err != nil {
		return fmt.Errorf("capture: %w", err)
	}
	return nil
}
