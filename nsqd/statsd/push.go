// Package statsd pushes a broker's stats to a statsd daemon over UDP, under the paths that
// nsqadmin and the documented Graphite configuration expect. A counter is sent as its growth
// since the last push.
//
// format.go formats stats as lines and packets and knows no clock or socket; push.go sends them.
// Source: the section "Statsd / Graphite Integration" of nsq.io/components/nsqd.html.
package statsd

import (
	"context"
	"flag"
	"log/slog"
	"net"
	"time"

	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/stats"
)

// Config configures a Pusher. Immutable.
type Config struct {
	Address     string        // host:port; resolved at each push
	Prefix      string        // of every path, see the function Prefix
	Interval    time.Duration // between pushes
	PacketSize  int           // bytes; a longer line gets its own packet
	Percentiles []float64     // of end-to-end latencies
	Memory      bool          // include the broker's memory
	NoEphemeral bool          // exclude ephemeral topics and channels
	// Topics returns the stats of all topics, in their order.
	Topics func() []broker.Stats
	Log    *slog.Logger
}

// Flags defines the flags of the push.
func (c *Config) Flags(fs *flag.FlagSet) {
	fs.StringVar(&c.Address, "statsd-address", "", "UDP `host:port` of a statsd daemon to push metrics to (default none)")
	fs.StringVar(&c.Prefix, "statsd-prefix", "nsq.%s", "`prefix` of the metrics' paths; %s stands for broadcast address and HTTP port")
	fs.DurationVar(&c.Interval, "statsd-interval", time.Minute, "how long between two pushes")
	fs.BoolVar(&c.Memory, "statsd-mem-stats", true, "push metrics of memory and garbage collection, too")
	fs.IntVar(&c.PacketSize, "statsd-udp-packet-size", 508, "maximum size of a packet to statsd, in `bytes`")
	fs.BoolVar(&c.NoEphemeral, "statsd-exclude-ephemeral", false, "do not push metrics of ephemeral topics and channels")
}

// Validate reports all problems at once.
func (c Config) Validate() error {
	var errs faults.List
	_, port, err := net.SplitHostPort(c.Address)
	errs.If(err != nil || port == "", "--statsd-address %q: want host:port", c.Address)
	errs.If(c.Interval <= 0, "--statsd-interval %v is not positive", c.Interval)
	errs.If(c.PacketSize < 1 || c.PacketSize > 65507, "--statsd-udp-packet-size %d bytes: want 1 to 65507", c.PacketSize)
	errs.If(c.Topics == nil || c.Log == nil, "statsd: topics and a log are needed")
	return errs.Err()
}

// mostGap is the maximum time between two packets of a push. The gap protects the daemon's socket
// buffer, which would drop part of a burst.
const mostGap = 5 * time.Millisecond

// Pusher pushes stats. Make it with New.
type Pusher struct {
	// Set once.
	cfg Config
	// Owned by Run.
	f      formatter
	failed bool // the last push failed and was logged
}

// New returns a Pusher, idle before Run.
func New(cfg Config) (*Pusher, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return &Pusher{cfg: cfg, f: formatter{prefix: cfg.Prefix, percentiles: cfg.Percentiles, ephemeral: !cfg.NoEphemeral}}, nil
}

// Run pushes every interval until ctx ends. If the daemon is unreachable, Run logs the failure
// once, and the stats of the push are lost.
func (p *Pusher) Run(ctx context.Context) error {
	ticker := time.NewTicker(p.cfg.Interval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		err := p.push(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && !p.failed:
			p.cfg.Log.Warn("push to statsd failed", obs.KeyAddress, p.cfg.Address, obs.KeyError, err)
		case err == nil && p.failed:
			p.cfg.Log.Info("push to statsd works again", obs.KeyAddress, p.cfg.Address)
		}
		p.failed = err != nil
	}
}

func (p *Pusher) push(ctx context.Context) error {
	var mem *stats.Memory
	if p.cfg.Memory {
		m := stats.ReadMemory()
		mem = &m
	}
	all := packets(p.f.lines(p.cfg.Topics(), mem), p.cfg.PacketSize)
	if len(all) == 0 {
		return nil
	}
	d := net.Dialer{Timeout: p.cfg.Interval}
	nc, err := d.DialContext(ctx, "udp", p.cfg.Address)
	if err != nil {
		return err
	}
	defer nc.Close()
	gap := min(mostGap, p.cfg.Interval/2/time.Duration(len(all)))
	timer := time.NewTimer(gap)
	defer timer.Stop()
	var first error
	for i, packet := range all {
		if i > 0 {
			timer.Reset(gap)
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-timer.C:
			}
		}
		// A missing listener shows only at the next packet; still try the other packets.
		if _, err := nc.Write([]byte(packet)); err != nil && first == nil {
			first = err
		}
	}
	return first
}
