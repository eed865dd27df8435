// Package convergence reproduces Table 1 of the paper (section 6.5) with real processes: a
// loaddistributor, six nsqd, a tbadaptor, and publishers that send in synchronised groups.
// For each row, the loaddistributor searches for a number of brokers that meets the SLO.
// Then the result is measured in a long run.
//
//	make convergence ARGS='--rows=5,30 --modes=fast'
//
// The brokers share this machine's processors, so no broker would have its own capacity.
// Therefore nsqd is built with the tag paced (nsqd/conn), and works for --pace on each
// message before writing it. The number of messages that such a broker absorbs within the
// SLO is the SLO's latency divided by the pace, as if its processor were that slow. The
// load is what the machine can carry in addition: a sixteenth of the paper's rate. The test
// of the fast search takes a fixed number of messages, and therefore lasts longer here.
//
// The mode off does not search. Its rows show the placement by rate alone, as a baseline
// for the search. Every row has its own cluster without learned state.
//
// run.go runs a row, table.go prints. `drlsim convergence` is the same in simulation, at
// full size; docs/evaluation/fitting.md has both tables.
package convergence

import (
	"context"
	"debug/buildinfo"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/srtm-io/srtm/bench/host"
	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
	"github.com/srtm-io/srtm/tools/iotpub/load"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
)

// modeOff is the loaddistributor's mode without a search: topics stay where their rate
// places them.
const modeOff = "off"

// config holds the flags.
type config struct {
	rows    []int
	modes   []string
	load    load.Options // without the groups
	brokers int
	pace    time.Duration
	slo     time.Duration
	margin  float64
	mcap    int64 // 0: spareRate times the contract's rate
	round   time.Duration
	check   time.Duration
	limit   time.Duration // per fit
	json    string
	data    string // empty: a temporary folder, removed after success
	bin     string
	args    []string
}

// Run measures and prints the rows of the table.
func Run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	c, err := parse(args, stdout)
	if err != nil {
		return host.Usage(err)
	}
	if err := c.binaries(); err != nil {
		return err
	}
	r := Report{Version: program.Version(), CPUs: runtime.NumCPU(), Args: c.args}
	var failed []error // a row that fails, such as a fit without an end, does not end the others
	for _, group := range c.rows {
		for _, mode := range c.modes {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			row, err := c.row(ctx, group, mode, func(format string, args ...any) {
				fmt.Fprintf(stderr, "groups of %d, %s: %s\n", group, mode, fmt.Sprintf(format, args...))
			})
			if err != nil {
				failed = append(failed, fmt.Errorf("groups of %d, %s: %w", group, mode, err))
				continue
			}
			r.Rows = append(r.Rows, *row)
			if c.json == "" {
				continue
			}
			if err := host.WriteJSON(c.json, &r); err != nil { // partial results survive a failure of the next row
				return err
			}
		}
	}
	r.WriteText(stdout)
	return errors.Join(failed...)
}

func parse(args []string, help io.Writer) (*config, error) {
	c := &config{load: load.Default(), args: args}
	fs := flag.NewFlagSet("convergence", flag.ContinueOnError)
	rows := fs.String("rows", "5,10,15,20,25,30", "comma-separated `sizes` of the groups that send at the same instants")
	modes := fs.String("modes", tuner.ModeFast+","+tuner.ModePaper, "comma-separated `modes` of the loaddistributor's --fitting")
	s := &c.load.Spec
	fs.IntVar(&s.Publishers, "publishers", 300, "`number` of publishers, each with a connection")
	fs.Float64Var(&s.Rate, "rate", 2, "`msg/s` of each")
	fs.IntVar(&s.Batch, "batch", 10, "`messages` that each sends at once")
	process := fs.String("process", string(schedule.Periodic), "spacing of a group's batches: `poisson or periodic`")
	fs.Uint64Var(&s.Seed, "seed", 1, "`number` that decides the schedule and the loaddistributor's random choices")
	fs.IntVar(&c.brokers, "brokers", 6, "`number` of brokers")
	fs.DurationVar(&c.pace, "pace", 200*time.Microsecond, "`time` that a broker works on a message")
	fs.DurationVar(&c.slo, "slo", 20*time.Millisecond, "`latency` that 99 % of the messages are to keep")
	fs.Float64Var(&c.margin, "margin", 0.5, "`fraction` of the contract's burst on top of the profiled one")
	fs.Int64Var(&c.mcap, "mcap", 0, "maximum rate of each broker within the SLO, in `msg/s`, which decides on how many a topic begins (default twice the contract's: one)")
	fs.DurationVar(&c.round, "round", 5*time.Second, "length of a round of the mode paper")
	fs.DurationVar(&c.check, "check", 30*time.Second, "how long the placement is measured after the fit")
	fs.DurationVar(&c.limit, "limit", 8*time.Minute, "maximum length of a fit")
	fs.StringVar(&c.json, "json", "", "`file` for the results as JSON")
	fs.StringVar(&c.data, "data-dir", "", "`folder` for the processes' logs and data, in one of its own for each row (default a new one, removed after success)")
	fs.StringVar(&c.bin, "bin-dir", "build/paced", "`folder` of nsqd, loaddistributor, tbadaptor and iotpub, built with the tag paced (make convergence)")
	if err := host.Parse(fs, args, help); err != nil {
		return nil, err
	}
	s.Process, s.Sync = schedule.Process(*process), true
	c.modes = strings.Split(*modes, ",")
	var f faults.List
	for _, text := range strings.Split(*rows, ",") {
		n, err := strconv.Atoi(text)
		f.If(err != nil || n < 2 || n > s.Publishers, "--rows %q: want numbers of 2 to all %d publishers", text, s.Publishers)
		c.rows = append(c.rows, n)
	}
	for _, mode := range c.modes {
		f.If(!slices.Contains([]string{modeOff, tuner.ModeFast, tuner.ModePaper}, mode), "--modes %q is none of %s, %s, %s", mode, modeOff, tuner.ModeFast, tuner.ModePaper)
	}
	f.If(c.brokers < 1 || c.brokers > 20, "--brokers %d: want 1 to 20", c.brokers)
	f.If(c.pace < 20*time.Microsecond || c.pace > time.Second, "--pace %v: want 20us to 1s", c.pace)
	f.If(c.slo <= 0, "--slo %v is not above 0", c.slo)
	f.If(!(c.margin >= 0 && c.margin <= 100), "--margin %v: want 0 to 100", c.margin)
	f.If(c.mcap < 0, "--mcap %d: want 1 or more, or 0 for the default", c.mcap)
	f.If(c.round < time.Second, "--round %v: want 1s or more", c.round)
	f.If(c.check < time.Second || c.check > 10*time.Minute, "--check %v: want 1s to 10m", c.check)
	f.If(c.limit < time.Second || c.limit > time.Hour, "--limit %v: want 1s to 1h", c.limit)
	if len(f) == 0 {
		f.If(c.spec(c.rows[0]).Validate() != nil, "%w", c.spec(c.rows[0]).Validate())
	}
	return c, f.Err()
}

// spec is the load of a row.
func (c *config) spec(group int) schedule.Spec {
	s := c.load.Spec
	s.GroupSize = group
	return s
}

// binaries checks the programs and sets the pace.
func (c *config) binaries() (err error) {
	if c.bin, err = filepath.Abs(c.bin); err != nil {
		return err
	}
	for _, program := range []string{"nsqd", "loaddistributor", "tbadaptor", "iotpub"} {
		built, err := buildinfo.ReadFile(filepath.Join(c.bin, program))
		if err != nil {
			return fmt.Errorf("%w: run make convergence", err)
		}
		if program == "nsqd" && !slices.ContainsFunc(built.Settings, func(s debug.BuildSetting) bool { return s.Key == "-tags" && strings.Contains(s.Value, "paced") }) {
			return fmt.Errorf("%s was not built with the tag paced: its brokers would have no capacity of their own", built.Path)
		}
	}
	return os.Setenv(paceVariable, c.pace.String()) // inherited by the brokers
}

// paceVariable is the environment variable of a paced nsqd.
const paceVariable = "SRTM_PACE"
