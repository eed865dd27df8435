//go:build linux

// Command bench runs benchmarks. Each scenario measures programs on this machine and prints
// tables: comparisons of our brokers and daemons with other programs, the cost of their
// parts, and the figures of the papers.
//
//	go run ./bench --help
//	go run ./bench peer --list
//
// A scenario is a package of this folder, with its own flags (bench peer --help). Package
// host holds the common parts: flags, rounds and tables. The minimal broker, bench/floor,
// is a separate program: as part of this program it would be four times as large.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/srtm-io/srtm/bench/admission"
	"github.com/srtm-io/srtm/bench/convergence"
	"github.com/srtm-io/srtm/bench/decide"
	"github.com/srtm-io/srtm/bench/figures"
	"github.com/srtm-io/srtm/bench/gateway"
	"github.com/srtm-io/srtm/bench/pacing"
	"github.com/srtm-io/srtm/bench/peer"
	"github.com/srtm-io/srtm/bench/replicated"
	"github.com/srtm-io/srtm/bench/scale"
	"github.com/srtm-io/srtm/bench/scaling"
	"github.com/srtm-io/srtm/bench/stamps"
	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/program"
)

// run executes a scenario. args follow the scenario's name.
type run func(ctx context.Context, args []string, stdout, stderr io.Writer) error

// scenarios lists all scenarios in the order of the help.
var scenarios = []struct {
	name, about string
	run         run
}{
	{"peer", "our broker beside others, on the same work (make bench, make bench-full)", peer.Run},
	{"scaling", "what event loops are worth (make scaling)", scaling.Run},
	{"replicated", "what replicated storage costs (make bench-replicated)", replicated.Run},
	{"pacing", "a topic that is offered more than its contract", pacing.Run},
	{"stamps", "how far arrival stamps are off", stamps.Run},
	{"scale", "the control plane at size (make scale)", scale.Run},
	{"admission", "what an admission decision costs (make bench-admission)", admission.Run},
	{"gateway", "what the gateway costs, and how well it chooses (make bench-gateway)", gateway.Run},
	{"convergence", "the paper's Table 1 with real processes (make convergence)", convergence.Run},
	{"figures", "the figures of the papers (make figures)", figures.Run},
}

func main() {
	// A bare server handles no signals, so a signal ends it at once.
	if len(os.Args) > 1 && os.Args[1] == decide.BareCommand {
		program.PrintError(os.Stderr, "bench", decide.Serve(os.Args[2:]))
		os.Exit(1)
	}
	os.Exit(lifecycle.Main("bench", func(ctx context.Context) error { return start(ctx, os.Args[1:], os.Stdout, os.Stderr) }))
}

// start runs the scenario that the first argument names.
func start(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	name := ""
	if len(args) > 0 {
		name = args[0]
	}
	switch name {
	case "help", "-h", "-help", "--help":
		fmt.Fprint(stdout, usage())
		return nil
	}
	for _, s := range scenarios {
		if s.name == name {
			return s.run(ctx, args[1:], stdout, stderr)
		}
	}
	return program.UsageError{Err: fmt.Errorf("no scenario %q; bench --help lists them", name)}
}

func usage() string {
	var b strings.Builder
	b.WriteString("Usage: bench SCENARIO [flags]\n\n")
	for _, s := range scenarios {
		fmt.Fprintf(&b, "  %-12s %s\n", s.name, s.about)
	}
	b.WriteString("\nbench SCENARIO --help lists the flags of a scenario.\n")
	return b.String()
}
