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

	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/secure"
)

// Program is a daemon, as its main.go describes it.
type Program struct {
	Name     string
	About    string   // the first paragraph of --help
	Examples string   // command lines for --help, each on a line that begins with two spaces
	Banner   string   // a line before our own version: "" for none
	Groups   []Group  // of the flags that not every daemon has
	First    []string // flags that --help shows; --help=all shows the others; nil: it shows all
	// Values are right values of flags, for errors: of flags whose default is none, and for
	// which the name of the value says too little.
	Values map[string]string
	// Argument is the flag that takes the one argument that is no flag. If Argument is "",
	// an argument is a fault.
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
// them is a lifecycle.UsageError that names everything. From then on neither a closed
// terminal nor a log that cannot be written ends the process.
func (p *Program) Execute(ctx context.Context, args []string) error {
	lifecycle.Survive()
	log, level, err := p.Parse(args, os.Stdout)
	switch {
	case errors.Is(err, errDone):
		return nil
	case err != nil:
		return lifecycle.UsageError{Err: err}
	}
	defer ReloadAtHangup(log)()
	return p.Run(ctx, log, level)
}

// ReloadAtHangup has the daemon read its token files and certificates again at each SIGHUP,
// until stop is called: see secure.ReadAgain.
func ReloadAtHangup(log *slog.Logger) (stop func()) {
	return lifecycle.OnHangup(func() {
		secure.ReadAgain()
		log.Info("SIGHUP: token files and certificates are read again at their next use")
	})
}

// Parse reads the flags and the file, without running anything. It prints what
// --help and --version ask for to out, and then returns an error.
func (p *Program) Parse(args []string, out io.Writer) (*slog.Logger, *slog.LevelVar, error) {
	var config, level, format string
	var version bool
	var help helpValue
	c := commandLine{Program: p, fs: flag.NewFlagSet(p.Name, flag.ContinueOnError), bad: map[string]bool{}}
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
		fmt.Fprintln(out, obs.Version())
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
	if whole { // else what the file says is missing
		c.judge(p.Validate())
	}
	return log, variable, c.faults.Err()
}
