//go:build linux

// Package stamps measures the errors of arrival stamps on this machine, and their effect on
// a rate limiter. The sender uses the same CLOCK_MONOTONIC:
//
//	go run ./bench stamps --conns=1000 --rate=10000 --busy=8
//
// The receiver reads with one goroutine per connection, like nsqd, while other goroutines
// keep the processors busy. Each message carries the time when its write began, and the
// time when the connection's previous write returned. The sender is a separate process,
// sends open loop and keeps a rate contract, so a rate limiter with the same contract
// should delay nothing. Quantiles are exact quantiles of single messages.
//
// Scenarios of bench/peer (--sources) measure the cost of stamps, and nsqd's handling of
// such a stream. docs/arrival-stamps.md has results.
package stamps

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/srtm-io/srtm/bench/host"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/tools/load"
)

// config holds the flags.
type config struct {
	modes    []hook.Mode
	conns    int
	rates    []int
	size     int
	burst    int
	busy     int
	procs    int
	duration time.Duration
	warm     time.Duration // warm-up time
	seed     uint64
}

// Run prints the errors of arrival stamps. With sendCommand, Run is the sender.
func Run(ctx context.Context, args []string, stdout, _ io.Writer) error {
	if len(args) > 1 && args[0] == sendCommand {
		return sendMain(ctx, args[1:], os.Stdin, stdout)
	}
	c, err := parse(args, stdout)
	if err != nil {
		return host.Usage(err)
	}
	fmt.Fprintf(stdout, "%s, kernel %s, GOMAXPROCS %d of %d, seed %d\n", strings.Join(args, " "), host.Kernel(), c.procs, runtime.NumCPU(), c.seed)
	return measureErrors(ctx, c, stdout)
}

// scenario is the load of all measurements.
func (c config) scenario(rate int) load.Scenario {
	return load.Scenario{Name: "stamps", Conns: c.conns, Rate: float64(rate), Together: 1, Size: c.size, Channels: 1, Burst: c.burst}
}

func parse(args []string, help io.Writer) (config, error) {
	c := config{warm: load.Warming}
	fs := flag.NewFlagSet("stamps", flag.ContinueOnError)
	modes := fs.String("sources", "ebpf,sotimestamp,off", "`modes` to compare")
	fs.IntVar(&c.busy, "busy", 0, "`goroutines` that only compute, beside the receiver")
	fs.IntVar(&c.burst, "burst", 50, "burst of the contract, in `messages`; the contract's rate is 1.1 times --rate")
	rateList := fs.String("rate", "10000", "`msg/s` of all connections; several rates with commas")
	fs.IntVar(&c.conns, "conns", 1000, "`number` of connections")
	fs.IntVar(&c.size, "size", 200, "bytes per message, at least 64")
	fs.IntVar(&c.procs, "procs", 2, "GOMAXPROCS of the receiver")
	fs.DurationVar(&c.duration, "duration", 5*time.Second, "how long each measurement lasts, after a second of warming up")
	fs.Uint64Var(&c.seed, "seed", 1, "`number` that decides the schedule")
	if err := host.Parse(fs, args, help); err != nil {
		return c, err
	}
	for _, m := range strings.Split(*modes, ",") {
		mode, err := hook.ParseMode(m)
		if err != nil {
			return c, err
		}
		c.modes = append(c.modes, mode)
	}
	for _, r := range strings.Split(*rateList, ",") {
		var rate int
		if n, err := fmt.Sscan(r, &rate); n != 1 || err != nil || rate < 1 || rate > 1_000_000 {
			return c, fmt.Errorf("--rate %q: want 1 to 1000000", r)
		}
		c.rates = append(c.rates, rate)
	}
	if c.conns < 1 || c.conns > 20_000 || c.size < 64 || c.size > 4096 || c.procs < 1 || c.duration <= 0 || c.busy < 0 || c.burst < 2 {
		return c, errors.New("want 1 to 20000 --conns, --size 64 to 4096, --burst of 2 or more, and the rest positive")
	}
	return c, nil
}
