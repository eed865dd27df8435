//go:build linux

// Package peer compares brokers on the same work in one run: ours, any broker with the NSQ
// protocol, NATS, Redis streams and mosquitto.
//
//	go run ./bench peer --list
//	go run ./bench peer --scenarios=poisson-1000 --nsq=upstream=/path/to/nsqd --json=out.json
//
// With --loaddistributor our broker is also measured in a cluster of two: with publishers
// at the broker of the topic, and with publishers at the other broker, which forwards.
//
// With --before an earlier build of our broker is measured, too. With --ttl our broker is also
// measured with a TTL and dead letters that no message reaches. With --mqtt brokers are also
// measured with publishers and subscribers of MQTT.
//
// In each round every broker starts anew and gets the same work by the same schedule. The
// tables show medians of the rounds. The column "least p99" shows the least disturbed
// round. tools/load performs and measures the work. Some columns describe the disturbances:
//   - late p99 is the delay of the sender. A broker only causes it by using the processor.
//   - load us/msg is the processor time of the load.
//   - others % is the share of processor time that neither the load nor the broker used, in
//     the worst round. If it is high, repeat the measurement.
package peer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/srtm-io/srtm/bench/host"
	"github.com/srtm-io/srtm/tools/load"
)

// config holds the flags.
type config struct {
	scenarios  []load.Scenario
	peers      []load.Broker
	skipped    []string // brokers, with reasons
	rounds     int
	lasting    time.Duration
	seed       uint64
	startLimit time.Duration // no run starts later; 0: unlimited
	merge      []string      // report files of earlier runs to show, in place of a measurement
	json       string
	markdown   string
	list       bool
}

// report is the output of a run.
type report struct {
	Commit  string        `json:"commit"`
	Kernel  string        `json:"kernel"`
	CPUs    int           `json:"cpus"`
	Go      string        `json:"go"`
	Flags   []string      `json:"flags"`
	Seed    uint64        `json:"seed"`
	Lasting string        `json:"duration"`
	Brokers []broker      `json:"brokers"`
	Skipped []string      `json:"skipped,omitempty"`
	Runs    []load.Result `json:"runs"`
}

type broker struct {
	Name    string `json:"name"`
	Version string `json:"version"`
}

// Run measures brokers, or shows earlier measurements.
func Run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	c, err := parse(args, stdout)
	if err != nil {
		return host.Usage(err)
	}
	if c.list {
		for _, s := range append(scenarios(), stampScenarios()...) {
			fmt.Fprintf(stdout, "%-14s %s\n", s.Name, s.What)
		}
		return nil
	}
	var r report
	if len(c.merge) > 0 {
		r, err = merged(c.merge)
	} else {
		r = measure(ctx, c, args, stdout, stderr)
	}
	if err != nil {
		return err
	}
	if err := errors.Join(writeTables(stdout, c.scenarios, r.names(), r.Runs), writeVerdicts(stdout, c.scenarios, r.names(), r.Runs)); err != nil {
		return err
	}
	if c.json != "" {
		if err := host.WriteJSON(c.json, r); err != nil {
			return err
		}
	}
	if c.markdown != "" {
		var text bytes.Buffer
		if err := errors.Join(r.writePage(&text, c.scenarios), os.WriteFile(c.markdown, text.Bytes(), 0o644)); err != nil {
			return err
		}
	}
	for _, result := range r.Runs {
		if result.Error != "" {
			return fmt.Errorf("%s with %s: %s", result.Scenario, result.Peer, result.Error)
		}
	}
	return ctx.Err()
}

// measure performs the configured scenarios.
func measure(ctx context.Context, c config, args []string, stdout, stderr io.Writer) report {
	debug.SetGCPercent(400) // reduces the load's own garbage collections
	r := report{
		Commit: host.Commit(ctx), Kernel: host.Kernel(), CPUs: runtime.NumCPU(), Go: runtime.Version(), Flags: args,
		Seed: c.seed, Lasting: c.lasting.String(), Skipped: c.skipped,
	}
	for _, p := range c.peers {
		r.Brokers = append(r.Brokers, broker{p.Name, version(ctx, p.Path)})
	}
	fmt.Fprintf(stdout, "commit %s, kernel %s, %d processors, %s, seed %d\nflags: %s\n", r.Commit, r.Kernel, r.CPUs, r.Go, r.Seed, strings.Join(r.Flags, " "))
	for _, b := range r.Brokers {
		fmt.Fprintf(stdout, "%s: %s\n", b.Name, b.Version)
	}
	for _, s := range c.skipped {
		fmt.Fprintln(stdout, s)
	}
	r.Runs = c.all(ctx, stderr)
	return r
}

// merged merges several reports. The reports must have the same brokers, machine and
// duration.
func merged(files []string) (all report, err error) {
	for i, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return all, err
		}
		var r report
		if err := json.Unmarshal(text, &r); err != nil {
			return all, fmt.Errorf("%s: %w", file, err)
		}
		if len(r.Brokers) == 0 {
			return all, fmt.Errorf("%s is not a report of bench peer --json", file)
		}
		if i == 0 {
			all = r
			continue
		}
		if r.Commit != all.Commit || r.Kernel != all.Kernel || r.CPUs != all.CPUs || r.Go != all.Go || r.Seed != all.Seed || r.Lasting != all.Lasting || !slices.Equal(r.Brokers, all.Brokers) {
			return all, fmt.Errorf("%s does not match %s: both need the same commit, kernel, processors, Go, seed, duration and brokers", file, files[0])
		}
		all.Runs = append(all.Runs, r.Runs...)
	}
	return all, nil
}

func (r report) names() (names []string) {
	for _, b := range r.Brokers {
		names = append(names, b.Name)
	}
	return names
}

// all performs every scenario with every broker in each round. The rounds of a scenario are
// far apart, so a disturbance affects few of them.
func (c config) all(ctx context.Context, progress io.Writer) (runs []load.Result) {
	began := time.Now()
	for round := range c.rounds {
		for _, s := range c.scenarios {
			for i := range c.peers {
				p := c.peers[(i+round)%len(c.peers)] // another broker first in each round
				if s.NSQOnly && !p.NSQ || p.Bare && (s.TLS || s.Late) || ctx.Err() != nil {
					continue
				}
				if c.startLimit > 0 && time.Since(began) > c.startLimit {
					fmt.Fprintf(progress, "stopped in round %[2]d: --within=%[1]v is over\n", c.startLimit, round+1)
					return runs
				}
				runtime.GOMAXPROCS(load.Procs() + s.Busy)
				// All brokers of a round get the same schedule.
				r, err := load.Perform(ctx, p, s, c.lasting, c.seed+uint64(round))
				r.Scenario, r.Peer, r.Round = s.Name, p.Name, round+1
				if err != nil {
					r.Error = err.Error()
				}
				fmt.Fprintf(progress, "%s, round %d, %s: %d sent, p99 %.3f ms, %.2f us/msg, load %.2f us/msg, others %.0f%% %s\n", s.Name, r.Round, p.Name, r.Sent, r.P99, r.CPU, r.Load, r.Others, r.Error)
				runs = append(runs, r)
			}
		}
	}
	return runs
}

func parse(args []string, help io.Writer) (c config, err error) {
	fs := flag.NewFlagSet("peer", flag.ContinueOnError)
	set := fs.String("set", "short", "`short`, or full: every scenario, 3 rounds of 2 seconds within 25 minutes; other flags override this")
	names := fs.String("scenarios", "poisson-1000,pipelined", "`names`, with commas, or all; see --list")
	only := fs.String("only", "", "brokers to measure, by `name`, with commas (default all installed brokers)")
	srtm := fs.String("srtm", "bin/nsqd", "`path` of our broker (make build)")
	control := fs.String("loaddistributor", "", "`path` of our loaddistributor: our broker is measured in a cluster of two as well, with publishers at the broker of the topic (srtm-direct) and at the other (srtm-forwarded)")
	sources := fs.String("sources", "", "`modes` of nsqd --arrival-stamps, with commas; our broker is measured with each mode")
	before := fs.String("before", "", "`path` of an earlier nsqd of ours, to be measured as srtm-before")
	ttl := fs.Bool("ttl", false, "measure our broker with a TTL and dead letters as well, which no message reaches (srtm-ttl)")
	mqtt := fs.Bool("mqtt", false, "measure the brokers of MQTT as well: ours (srtm-mqtt), nats-server (nats-mqtt) and the least that is possible (floor-mqtt)")
	var others []load.Broker
	fs.Func("nsq", "`name=path` of another broker that takes nsqd's flags; may be repeated. It is measured with a subscriber by default, and with an unbuffered one", func(s string) error {
		name, path, _ := strings.Cut(s, "=")
		if name == "" || path == "" {
			return errors.New("want name=path")
		}
		others = append(others, load.AnotherNSQ(name, path, ""), load.AnotherNSQ(name+"-unbuffered", path, load.Unbuffered))
		return nil
	})
	floor := fs.String("floor", "floor", "`path` of bench/floor, the least that is possible")
	natsPath := fs.String("nats", "nats-server", "`path` of nats-server")
	redisPath := fs.String("redis", "redis-server", "`path` of redis-server")
	mosquittoPath := fs.String("mosquitto", "mosquitto", "`path` of mosquitto")
	fs.IntVar(&c.rounds, "rounds", 3, "number of runs of each scenario with each broker")
	fs.DurationVar(&c.lasting, "duration", 5*time.Second, "how long is measured, after a second of warming up")
	fs.Uint64Var(&c.seed, "seed", 1, "`number` that decides the schedules; each round uses the next number")
	fs.DurationVar(&c.startLimit, "within", 0, "start no run after this `time`, and show the results so far (default no limit)")
	merge := fs.String("merge", "", "measure nothing; merge the results in these `files` of --json, with commas, and show them")
	fs.StringVar(&c.json, "json", "", "`file` for all figures")
	fs.StringVar(&c.markdown, "markdown", "", "`file` for a page with all tables and the project's targets")
	fs.BoolVar(&c.list, "list", false, "list the scenarios, and exit")
	if err := host.Parse(fs, args, help); err != nil || c.list {
		return c, err
	}
	if *merge != "" {
		c.merge, c.scenarios = strings.Split(*merge, ","), append(scenarios(), stampScenarios()...)
		return c, nil
	}
	given := map[string]bool{}
	fs.Visit(func(f *flag.Flag) { given[f.Name] = true })
	switch *set {
	case "short":
	case "full":
		for name, value := range map[string]string{"scenarios": "all", "rounds": "3", "duration": "2s", "within": "25m"} {
			if !given[name] {
				if err := fs.Set(name, value); err != nil {
					return c, err
				}
			}
		}
	default:
		return c, fmt.Errorf("--set: %q is neither short nor full", *set)
	}
	if c.startLimit < 0 {
		return c, fmt.Errorf("--within: %v is negative", c.startLimit)
	}
	if c.rounds < 1 || c.rounds > 100 || c.lasting < 100*time.Millisecond || c.lasting > time.Minute {
		return c, errors.New("want 1 to 100 --rounds, --duration of 100ms to 1m")
	}
	all := scenarios()
	selectable := append(slices.Clone(all), stampScenarios()...)
	for _, name := range strings.Split(*names, ",") {
		if name == "all" {
			c.scenarios = append(c.scenarios, all...)
			continue
		}
		i := slices.IndexFunc(selectable, func(s load.Scenario) bool { return s.Name == name })
		if i < 0 {
			return c, fmt.Errorf("no scenario %q; bench peer --list lists them", name)
		}
		c.scenarios = append(c.scenarios, selectable[i])
	}
	var brokers []load.Broker
	for source := range strings.SplitSeq(*sources, ",") {
		brokers = append(brokers, load.Ours(*srtm, source))
	}
	if *before != "" {
		b := load.Ours(*before, "")
		b.Name += "-before"
		brokers = append(brokers, b)
	}
	if *ttl {
		brokers = append(brokers, load.Expiring(*srtm))
	}
	if *control != "" {
		path, err := host.Program(*control)
		if err != nil {
			return c, err
		}
		brokers = append(brokers, load.Pair(*srtm, path, false), load.Pair(*srtm, path, true))
	}
	brokers = append(append(brokers, others...), load.Floor(*floor), load.NATS(*natsPath), load.Redis(*redisPath), load.Mosquitto(*mosquittoPath))
	if *mqtt {
		brokers = append([]load.Broker{load.OursMQTT(*srtm), load.FloorMQTT(*floor), load.NATSMQTT(*natsPath)}, brokers...)
	}
	wanted := strings.Split(*only, ",")
	for _, name := range wanted {
		if *only != "" && !slices.ContainsFunc(brokers, func(p load.Broker) bool { return p.Name == name }) {
			return c, fmt.Errorf("--only: no broker is named %q", name)
		}
	}
	for _, p := range brokers {
		if *only != "" && !slices.Contains(wanted, p.Name) {
			continue
		}
		found, err := host.Program(p.Path)
		if err != nil {
			c.skipped = append(c.skipped, fmt.Sprintf("%s is skipped: %v", p.Name, err))
			continue
		}
		p.Path = found
		c.peers = append(c.peers, p)
	}
	if len(c.peers) == 0 {
		return c, errors.New("no broker was found: " + strings.Join(c.skipped, "; "))
	}
	return c, nil
}

// version returns the first line of a broker's version output.
func version(ctx context.Context, path string) string {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	flag := "--version"
	if filepath.Base(path) == "mosquitto" {
		flag = "-h"
	}
	text, _ := exec.CommandContext(ctx, path, flag).CombinedOutput() // some brokers exit with a code
	line, _, _ := strings.Cut(strings.TrimSpace(string(text)), "\n")
	return line
}
