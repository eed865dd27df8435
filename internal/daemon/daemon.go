package daemon

import (
	"context"
	"errors"
	"flag"
	"io"
	"log/slog"
	"os"

	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/obs"
)

// Program is a daemon, as its main.go describes it.
type Program struct {
	Name   string
	About  string              // the first paragraph of --help
	Banner string              // a line before our own version: "" for none
	Flags  func(*flag.FlagSet) // adds those that not every daemon has
	// Argument is the flag that one argument after all flags is for, "": it is a fault.
	Argument string
	// Validate completes what was configured, or returns all that is wrong with it.
	Validate func() error
	// Run serves until ctx ends. The level of log may be changed.
	Run func(ctx context.Context, log *slog.Logger, level *slog.LevelVar) error
}

// Main runs the daemon that program makes with the arguments of the process, and
// ends the process, as lifecycle.Main says.
func Main(program *Program) {
	os.Exit(lifecycle.Main(program.Name, func(ctx context.Context) error {
		return program.Execute(ctx, os.Args[1:])
	}))
}

// Execute runs the daemon with these arguments until ctx ends. What is wrong with
// them is a lifecycle.UsageError that names everything.
func (p *Program) Execute(ctx context.Context, args []string) error {
	log, level, err := p.Parse(args, os.Stdout)
	switch {
	case errors.Is(err, errDone):
		return nil
	case err != nil:
		return lifecycle.UsageError{Err: err}
	}
	return p.Run(ctx, log, level)
}

// Parse reads the flags and the file, without running anything. It prints what
// --help and --version ask for to out, and then returns an error.
func (p *Program) Parse(args []string, out io.Writer) (*slog.Logger, *slog.LevelVar, error) {
	fs := flag.NewFlagSet(p.Name, flag.ContinueOnError)
	p.Flags(fs)
	level := fs.String("log-level", "info", "`level`: debug, info, warn, error, or fatal (nothing)")
	format := fs.String("log-format", "text", "`format`: text or json")
	if err := parse(fs, args, p.About, p.Banner, p.Argument, out); err != nil {
		return nil, nil, err
	}
	log, variable, err := obs.NewLogger(obs.Stderr, *level, *format)
	return log, variable, errors.Join(err, p.Validate())
}
