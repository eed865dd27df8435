package daemon

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/BurntSushi/toml"

	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/service"
)

// errDone means that --help or --version was answered and there is nothing to run.
var errDone = errors.New("done")

// commandLine is a command line during parsing. It collects all faults, so the operator
// sees them at once.
type commandLine struct {
	program *Program
	fs      *flag.FlagSet
	groups  []filledGroup
	faults  faults.List
	bad     map[string]bool // flags with a refused value; their defaults mean nothing
}

// fault records a flag's problem, with an example of a valid value.
func (c *commandLine) fault(f *flag.Flag, format string, args ...any) {
	c.bad[canonical(f)] = true
	c.faults = append(c.faults, fmt.Errorf("%w%s", fmt.Errorf(format, args...), c.forExample(f)))
}

// forExample returns the end of a fault's text.
func (c *commandLine) forExample(f *flag.Flag) string {
	if example := c.example(f); example != "" {
		return " (for example --" + f.Name + "=" + example + ")"
	}
	return ""
}

// set sets a flag. source names the origin of the value, for errors.
func (c *commandLine) set(f *flag.Flag, source, value string) {
	before := f.Value.String()
	value = c.withPort(f, value)
	if err := c.fs.Set(f.Name, value); err != nil {
		if kind(f) != nil {
			_ = f.Value.Set(before) // package flag sets 0 on errors
		}
		c.fault(f, "%s: %w", source, plainly(f, value, err))
	}
}

// withPort adds the default port to the value of a host:port flag: the port of the flag's
// default or example.
func (c *commandLine) withPort(f *flag.Flag, value string) string {
	if port := c.defaultPort(f); port != "" {
		return service.WithPort(value, port)
	}
	return value
}

// defaultPort returns the port of a host:port flag, from its default or example; ""
// without one.
func (c *commandLine) defaultPort(f *flag.Flag) string {
	if name, _ := flag.UnquoteUsage(c.fs.Lookup(canonical(f))); name != "host:port" {
		return ""
	}
	_, port, err := net.SplitHostPort(c.example(f))
	if err != nil {
		return ""
	}
	return port
}

// plainly replaces the errors of package flag, which name neither the value nor the
// expected form.
func plainly(f *flag.Flag, value string, err error) error {
	if !slices.Contains([]string{"parse error", "value out of range"}, err.Error()) {
		return err
	}
	want := "a value of another form"
	switch kind(f).(type) {
	case bool:
		want = "true or false"
	case int, int64:
		want = "a whole number"
	case uint, uint64:
		want = "a whole number, not negative"
	case float64:
		want = "a number"
	case time.Duration:
		want = "a duration with a unit"
	}
	return fmt.Errorf("%q: want %s", value, want)
}

// kind returns a value of the flag's type, or nil if the flag's type is unknown.
func kind(f *flag.Flag) any {
	value := f.Value
	if a, ok := value.(*alias); ok {
		value = a.Value
	}
	if g, ok := value.(flag.Getter); ok {
		return g.Get()
	}
	return nil
}

// read sets the flags in args and returns the other arguments.
func (c *commandLine) read(args []string) (rest []string) {
	for len(args) > 0 {
		arg := args[0]
		args = args[1:]
		if arg == "--" {
			return append(rest, args...)
		}
		name, isFlag := strings.CutPrefix(arg, "-")
		if !isFlag || name == "" {
			rest = append(rest, arg)
			continue
		}
		name, value, given := strings.Cut(strings.TrimPrefix(name, "-"), "=")
		if name == "h" {
			name = helpFlag
		}
		f := c.fs.Lookup(name)
		if f == nil {
			c.bad[faults.Nearest(name, c.names())] = true
			c.faults.If(true, "--%s: there is no such flag%s", name, faults.Hint("--", name, c.names()))
			if !given && len(args) > 0 && !strings.HasPrefix(args[0], "-") {
				args = args[1:] // probably the flag's value
			}
			continue
		}
		if !given && !isBool(f) {
			if len(args) == 0 {
				c.fault(f, "--%s: has no value", name)
				return rest
			}
			value, args = args[0], args[1:]
		} else if !given {
			value = "true"
		}
		c.set(f, "--"+name, value)
	}
	return rest
}

func isBool(f *flag.Flag) bool {
	b, ok := f.Value.(interface{ IsBoolFlag() bool })
	return ok && b.IsBoolFlag()
}

// names returns the names of all flags and settings.
func (c *commandLine) names() (names []string) {
	c.fs.VisitAll(func(f *flag.Flag) { names = append(names, f.Name) })
	return names
}

// readFile sets the flags that are in the file and not on the command line. It reports
// whether the file could be read.
func (c *commandLine) readFile(path string) (read bool) {
	given := map[string]bool{}
	c.fs.Visit(func(f *flag.Flag) { given[canonical(f)] = true })
	maps.Copy(given, c.bad)
	var file map[string]any
	if _, err := toml.DecodeFile(path, &file); err != nil {
		c.faults.If(true, "--config %s: %w", path, err)
		return false
	}
	for _, key := range slices.Sorted(maps.Keys(file)) {
		name := strings.ReplaceAll(key, "_", "-")
		setting := c.fs.Lookup(name)
		if name == configFlag || name == versionFlag || name == helpFlag || setting == nil {
			c.faults.If(true, "--config %s: unknown setting %q%s", path, key, faults.Hint("", name, c.names()))
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
			text, plain := settingText(setting, v)
			if !plain {
				c.fault(setting, "--config %s: %s is no plain value", path, key)
				continue
			}
			c.set(setting, "--config "+path+": "+key, text)
		}
	}
	return true
}

// settingText returns a value of the file in command line form. A duration as a number,
// or as a string of digits, is in milliseconds, as in configuration files of NSQ.
func settingText(setting *flag.Flag, v any) (text string, plain bool) {
	switch v := v.(type) {
	case map[string]any, []any, []map[string]any:
		return "", false
	case float64:
		text = strconv.FormatFloat(v, 'f', -1, 64)
	default:
		text = fmt.Sprint(v)
	}
	if _, is := kind(setting).(time.Duration); is && wholeNumber.MatchString(text) {
		text += "ms"
	}
	return text, true
}

var wholeNumber = regexp.MustCompile(`^-?[0-9]+$`)

// flagName matches a flag in an error's text.
var flagName = regexp.MustCompile(`--([a-z0-9-]*[a-z0-9])`)

// judge records the faults of validate, each with an example for the first flag in its
// text. It skips faults of flags with a refused value.
func (c *commandLine) judge(err error) {
	for _, fault := range flatten(err) {
		var named *flag.Flag
		if match := flagName.FindStringSubmatch(fault.Error()); match != nil {
			named = c.fs.Lookup(match[1])
		}
		switch {
		case named == nil:
			c.faults.Add(fault)
		case !c.bad[canonical(named)]:
			c.faults = append(c.faults, fmt.Errorf("%w%s", fault, c.forExample(named)))
		}
	}
}

// flatten returns the errors joined in err.
func flatten(err error) (all []error) {
	if err == nil {
		return nil
	}
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return []error{err}
	}
	for _, fault := range joined.Unwrap() {
		all = append(all, flatten(fault)...)
	}
	return all
}
