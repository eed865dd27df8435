package daemon

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/BurntSushi/toml"

	"github.com/srtm-io/srtm/internal/obs"
)

// errDone means that --help or --version was answered: there is nothing to run.
var errDone = errors.New("done")

// List is a flag that may be repeated.
type List []string

func (l *List) String() string { return strings.Join(*l, ",") }

// Set adds one.
func (l *List) Set(s string) error {
	if s == "" {
		return errors.New("is empty")
	}
	*l = append(*l, s)
	return nil
}

// OneOf returns what is wrong with the value of a flag that has a few: nothing, if it
// is one of them.
func OneOf(flag, value string, known ...string) error {
	if slices.Contains(known, value) {
		return nil
	}
	return fmt.Errorf("--%s %q is none of %s", flag, value, strings.Join(known, ", "))
}

// Within returns what is wrong with the value of a flag that has bounds.
func Within[T cmp.Ordered](flag string, value, low, high T) error {
	if value < low || value > high {
		return fmt.Errorf("--%s %v: want %v to %v", flag, value, low, high)
	}
	return nil
}

// Alias adds a second name to a flag, and says why it has one.
func Alias(fs *flag.FlagSet, name, other, why string) {
	fs.Var(&alias{fs.Lookup(name).Value, name}, other, "as --"+name+": "+why)
}

type alias struct {
	flag.Value
	of string
}

func (a *alias) String() string {
	if a.Value == nil { // package flag asks the zero value, too
		return ""
	}
	return a.Value.String()
}

func (a *alias) IsBoolFlag() bool {
	b, ok := a.Value.(interface{ IsBoolFlag() bool })
	return ok && b.IsBoolFlag()
}

// canonical returns the name of a flag, or of the one that it is an alias of.
func canonical(f *flag.Flag) string {
	if a, ok := f.Value.(*alias); ok {
		return a.of
	}
	return f.Name
}

// parse adds --config and --version to fs, and reads args and the file they name.
// In the file _ may stand for -, and a list repeats a flag; a flag on the command
// line wins over the file.
func parse(fs *flag.FlagSet, args []string, about, banner, argument string, out io.Writer) error {
	config := fs.String("config", "", "TOML `file` with any of these settings")
	version := fs.Bool("version", false, "print the version and exit")
	fs.SetOutput(io.Discard) // an error is the caller's to print, once
	switch err := fs.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		fs.SetOutput(out)
		fmt.Fprintf(out, "%s\n\nUsage: %s [flags]\n", about, fs.Name())
		fs.PrintDefaults()
		return errDone
	case err != nil:
		return err
	case fs.NArg() > 1 || fs.NArg() == 1 && argument == "":
		return fmt.Errorf("unexpected argument %q", fs.Arg(0))
	case fs.NArg() == 1:
		if err := fs.Set(argument, fs.Arg(0)); err != nil {
			return fmt.Errorf("%q: %w", fs.Arg(0), err)
		}
	}
	switch {
	case *version:
		if banner != "" {
			fmt.Fprintln(out, banner)
		}
		fmt.Fprintln(out, obs.Version())
		return errDone
	case *config != "":
		return readFile(*config, fs)
	}
	return nil
}

// readFile sets the flags that the file names and the command line does not,
// or returns all that is wrong with it.
func readFile(path string, fs *flag.FlagSet) error {
	given := map[string]bool{}
	fs.Visit(func(f *flag.Flag) { given[canonical(f)] = true })
	var file map[string]any
	if _, err := toml.DecodeFile(path, &file); err != nil {
		return fmt.Errorf("--config %s: %w", path, err)
	}
	var errs []error
	for _, key := range slices.Sorted(maps.Keys(file)) {
		name := strings.ReplaceAll(key, "_", "-")
		setting := fs.Lookup(name)
		if name == "config" || name == "version" || setting == nil {
			errs = append(errs, fmt.Errorf("--config %s: unknown setting %q", path, key))
			continue
		}
		if given[canonical(setting)] {
			continue
		}
		values, isList := file[key].([]any)
		if !isList {
			values = []any{file[key]}
		}
		for _, v := range values {
			switch v.(type) {
			case map[string]any, []any, []map[string]any:
				errs = append(errs, fmt.Errorf("--config %s: %s is no plain value", path, key))
				continue
			}
			if err := fs.Set(name, fmt.Sprint(v)); err != nil {
				errs = append(errs, fmt.Errorf("--config %s: %s: %w", path, key, err))
			}
		}
	}
	return errors.Join(errs...)
}
