// Package daemon is the common part of daemons' main packages: flags and the
// configuration file, the log, exit codes. For control plane daemons it also has the gRPC
// and HTTP servers with TLS, tokens, metrics, profiles and health. It knows nothing of a
// daemon's purpose. See the main.go of tbadaptor for an example.
package daemon

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"syscall"

	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/secure"
)

// Program describes a daemon.
type Program struct {
	Name     string
	About    string   // the first paragraph of --help
	Examples string   // command lines for --help, each indented by two spaces
	Banner   string   // a line before our version; "": none
	Groups   []Group  // flags besides the common flags
	First    []string // flags in --help; the others are in --help=all; nil: all
	// Values holds valid examples for errors: for flags without a default and with an
	// unclear value name.
	Values map[string]string
	// Argument is the flag that receives the one positional argument. If Argument is "", a
	// positional argument is an error.
	Argument string
	// Validate completes the configuration, or returns all its problems.
	Validate func() error
	// Run serves until ctx ends. It may change the level of log.
	Run func(ctx context.Context, log *slog.Logger, level *slog.LevelVar) error
}

// Main runs the daemon with the process's arguments and ends the process; see
// lifecycle.Main.
func Main(program *Program) {
	os.Exit(lifecycle.Main(program.Name, func(ctx context.Context) error {
		return program.Execute(ctx, os.Args[1:])
	}))
}

// Execute runs the daemon with the given arguments until ctx ends. Invalid arguments give
// a program.UsageError with all problems. From then on a closed terminal or an
// unwritable log does not end the process.
func (p *Program) Execute(ctx context.Context, args []string) error {
	lifecycle.Survive()
	log, level, err := p.Parse(args, os.Stdout)
	switch {
	case errors.Is(err, errDone):
		return nil
	case err != nil:
		return program.UsageError{Err: err}
	}
	defer ReloadAtHangup(log)()
	return addRemedy(p.Run(ctx, log, level))
}

// addRemedy adds to the error of a full disk what the operator can do.
func addRemedy(err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return fmt.Errorf("%w; free space on that disk (df -h) or free inodes (df -i), or use a folder on another disk", err)
	}
	return err
}

// ReloadAtHangup makes the daemon reload its token files and certificates at each SIGHUP,
// until stop is called; see secure.ReadAgain.
func ReloadAtHangup(log *slog.Logger) (stop func()) {
	return lifecycle.OnHangup(func() {
		secure.ReadAgain()
		log.Info("SIGHUP: token files and certificates are read again at their next use")
	})
}

// Parse reads the flags and the file without running anything. For --help and --version
// it prints to out and returns an error.
func (p *Program) Parse(args []string, out io.Writer) (*slog.Logger, *slog.LevelVar, error) {
	var config, level, format string
	var version bool
	var help helpValue
	c := commandLine{program: p, fs: flag.NewFlagSet(p.Name, flag.ContinueOnError), bad: map[string]bool{}}
	c.groups = fill(c.fs, append(slices.Clip(p.Groups), Group{Basics, func(fs *flag.FlagSet) {
		fs.StringVar(&config, configFlag, "", "TOML `file` with any of these settings")
		fs.StringVar(&level, "log-level", "info", "`level`: debug, info, warn, error, or fatal (nothing)")
		fs.StringVar(&format, "log-format", "text", "`format`: text or json")
		fs.BoolVar(&version, versionFlag, false, "print the version and exit")
		fs.Var(&help, helpFlag, "print the flags that matter first and exit; --help=all: all flags")
	}}))
	rest := c.read(args)
	switch {
	case help != helpNone:
		c.help(out, help)
		return nil, nil, errDone
	case version:
		if p.Banner != "" {
			fmt.Fprintln(out, p.Banner)
		}
		fmt.Fprintln(out, program.Version())
		return nil, nil, errDone
	}
	for i, arg := range rest {
		if argument := c.fs.Lookup(p.Argument); argument != nil && i == 0 {
			c.set(argument, strconv.Quote(arg), arg)
			continue
		}
		c.faults.If(true, "unexpected argument %q: flags begin with --, as in --%s", arg, helpFlag)
	}
	whole := config == "" || c.readFile(config)
	log, variable, err := obs.NewLogger(obs.Stderr, level, format)
	if _, wrong := obs.ParseLevel(level); wrong != nil {
		err = fmt.Errorf("--log-level: %w", err)
	} else if err != nil {
		err = fmt.Errorf("--log-format: %w", err)
	}
	c.judge(err)
	if whole { // otherwise settings of the file are missing
		c.judge(p.Validate())
	}
	return log, variable, c.faults.Err()
}
