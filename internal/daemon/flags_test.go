package daemon

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/testkit"
)

type options struct {
	address  string
	interval time.Duration
	count    int
	names    List
}

func read(t *testing.T, args ...string) (options, string, error) {
	t.Helper()
	return readWith(t, "", args...)
}

// readWith is read of a program with an argument.
func readWith(t *testing.T, argument string, args ...string) (options, string, error) {
	t.Helper()
	var o options
	var out bytes.Buffer
	p := Program{
		Name: "thing", About: "thing does it.", Banner: "thing v1.2.3", Examples: "  thing --count=4", Argument: argument, First: []string{"http-address", "count"},
		Groups: []Group{
			{Listen, func(fs *flag.FlagSet) { fs.StringVar(&o.address, "http-address", "x:1", "`host:port` to serve at") }},
			{Limits, func(fs *flag.FlagSet) {
				fs.DurationVar(&o.interval, "interval", time.Second, "how often it is done: "+strings.Repeat("again and ", 20))
				fs.IntVar(&o.count, "count", 3, "how many")
			}},
			{Listen, func(fs *flag.FlagSet) {
				fs.Var(&o.names, "name", "a `name`; may be repeated")
				Alias(fs, "name", "names", "its former name")
			}},
		},
		Validate: func() error {
			return errors.Join(faults.Within("count", o.count, 1, 10), errors.Join(faults.Within("interval", o.interval, time.Second, time.Hour)))
		},
	}
	_, _, err := p.Parse(args, &out)
	return o, out.String(), err
}

func TestFlagsWinOverTheFileWhichWinsOverDefaults(t *testing.T) {
	path := testkit.File(t, "c.toml", "http_address = \"f:2\"\ninterval = \"5s\"\nname = [\"a\", \"b\"]\n")
	o, _, err := read(t, "--config", path, "--http-address", "c:3")
	testkit.Must(t, err)
	if o.address != "c:3" || o.interval != 5*time.Second || o.count != 3 || o.names.String() != "a,b" {
		t.Errorf("got %+v", o)
	}
}

// A host without a port gets the default port of the flag.
func TestDefaultPort(t *testing.T) {
	for value, want := range map[string]string{"localhost": "localhost:1", "localhost:2": "localhost:2", "::1": "[::1]:1", "": "", "/run/s": "/run/s"} {
		o, _, err := read(t, "--http-address="+value)
		testkit.Must(t, err)
		testkit.Equal(t, o.address, want, "%q", value)
		o, _, err = read(t, "--config", testkit.File(t, "c.toml", fmt.Sprintf("http_address = %q", value)))
		testkit.Must(t, err)
		testkit.Equal(t, o.address, want, "%q in the file", value)
	}
}

// An alias stands for its flag: the command line wins over the file by either name.
func TestAlias(t *testing.T) {
	former, present := testkit.File(t, "c.toml", `names = ["a", "b"]`), testkit.File(t, "c.toml", `name = ["a", "b"]`)
	for want, args := range map[string][]string{
		"a,b": {"--config", former}, "c": {"--config", former, "--name=c"}, "d": {"--config", present, "--names=d"},
		"e": {"--config", former, "--names=e"}, "f,g": {"--name=f", "--names=g"},
	} {
		if o, _, err := read(t, args...); err != nil || o.names.String() != want {
			t.Errorf("%q: %q, %v, want %q", args, o.names.String(), err, want)
		}
	}
}

// The parser recognizes the argument, even if a flag's value before it looks like an argument.
func TestArgument(t *testing.T) {
	for want, args := range map[string][]string{
		"a 3": {"a"}, "b 7": {"--count=7", "b"}, "c 8": {"--count", "8", "--name=c"}, " 9": {"--count", "9"},
	} {
		if o, _, err := readWith(t, "name", args...); err != nil || fmt.Sprint(&o.names, " ", o.count) != want {
			t.Errorf("%q: %s %d, %v, want %s", args, &o.names, o.count, err, want)
		}
	}
	for want, args := range map[string][]string{
		`unexpected argument "b": flags begin with --, as in --help`: {"a", "b"}, `"": is empty (for example --name=name)`: {""},
	} {
		if _, _, err := readWith(t, "name", args...); err == nil || err.Error() != want {
			t.Errorf("%q: %v, want %s", args, err, want)
		}
	}
}

func TestHelpAndVersion(t *testing.T) {
	_, out, err := read(t, "--help")
	testkit.ErrorIs(t, err, errDone, "--help")
	want := `thing does it.

Usage: thing [flags]

Examples:
  thing --count=4

Addresses:
  --http-address host:port      host:port to serve at (default x:1)

Limits:
  --count int                   how many (default 3)

thing --help=all shows all 10 flags.
`
	testkit.Equal(t, out, want, "--help")
	_, out, err = read(t, "--nope", "-h=all")
	testkit.ErrorIs(t, err, errDone, "--help=all")
	for _, part := range []string{"  --name name                   a name; may be repeated\n", "--names", "\nConfiguration and log:\n  --config file", "how often it is done: again and"} {
		if !strings.Contains(out, part) {
			t.Errorf("--help=all does not say %q:\n%s", part, out)
		}
	}
	for line := range strings.Lines(out) {
		if len(line) > helpWidth+1 {
			t.Errorf("a line of %d characters: %s", len(line)-1, line)
		}
	}
	if _, out, err = read(t, "--version"); !errors.Is(err, errDone) || !strings.HasPrefix(out, "thing v1.2.3\nSRTM ") {
		t.Errorf("--version: %q, %v", out, err)
	}
}

func TestAFullDiskIsNamedWithWhatToDo(t *testing.T) {
	for _, cause := range []error{syscall.ENOSPC, syscall.EDQUOT} {
		program := Program{Name: "thing", Validate: func() error { return nil }, Run: func(context.Context, *slog.Logger, *slog.LevelVar) error {
			return fmt.Errorf("--data-path: %w", &fs.PathError{Op: "open", Path: "/full/lock", Err: cause})
		}}
		if err := program.Execute(t.Context(), nil); !errors.Is(err, cause) || !strings.Contains(err.Error(), "/full/lock") || !strings.Contains(err.Error(), "free space on that disk") {
			t.Errorf("the daemon ends with %v", err)
		}
	}
}

func TestFaults(t *testing.T) {
	for _, test := range []struct {
		name string
		args []string
		want []string
	}{
		{"an unknown flag", []string{"--nope"}, []string{"--nope: there is no such flag"}},
		{"a mistyped flag", []string{"--cuont=3"}, []string{"--cuont: there is no such flag; did you mean --count?"}},
		{"a bad value", []string{"--count", "x"}, []string{`--count: "x": want a whole number (for example --count=3)`}},
		{"no value", []string{"--interval"}, []string{"--interval: has no value (for example --interval=1s)"}},
		{"everything wrong with the command line at once", []string{"--nope", "1", "--count=x", "--interval=2", "what", "--log-level=loud", "--help=some", "--version=no"},
			[]string{
				"--nope: there is no such flag", `--count: "x": want a whole number`, `--interval: "2": want a duration with a unit (for example --interval=1s)`,
				`unexpected argument "what"`, `"loud"`, `"some": want --help or --help=all`, `--version: "no": want true or false`,
			}},
		{"values that are no faults of form", []string{"--count=11", "--interval=1ms", "--nope"},
			[]string{"--count 11: want 1 to 10 (for example --count=3)", "--interval 1ms: want 1s to 1h0m0s (for example --interval=1s)", "--nope"}},
		{"an argument", []string{"what"}, []string{`"what"`}},
		{"no such file", []string{"--config", filepath.Join(t.TempDir(), "none.toml")}, []string{"none.toml"}},
		{"no TOML", []string{"--config", testkit.File(t, "c.toml", "a = ")}, []string{"c.toml"}},
		{"everything wrong with the file at once", []string{"--config", testkit.File(t, "c.toml", "nope = 1\ncuont = 2\ncount = \"x\"\nversion = true\n[name]\na = 1\n")},
			[]string{`unknown setting "nope"`, `unknown setting "cuont"; did you mean count?`, `c.toml: count: "x": want a whole number (for example --count=3)`, `unknown setting "version"`, "name is no plain value"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, out, err := read(t, test.args...)
			if err == nil || errors.Is(err, errDone) {
				t.Fatalf("got %v", err)
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%v\ndoes not say %q", err, want)
				}
			}
			testkit.Equal(t, out, "", "printed")
		})
	}
}

// NSQ's configuration files have numbers of milliseconds for durations, also as strings. On the
// command line NSQ's flags need a unit.
func TestDurationsOfTheFileMayBeMilliseconds(t *testing.T) {
	for text, want := range map[string]time.Duration{
		`60000`: time.Minute, `"1500"`: 1500 * time.Millisecond, `"2m"`: 2 * time.Minute, `3600000.0`: time.Hour,
	} {
		o, _, err := read(t, "--config", testkit.File(t, "c.toml", "interval = "+text))
		testkit.Must(t, err)
		testkit.Equal(t, o.interval, want, "interval = %s", text)
	}
	for _, text := range []string{`9223372036854775807`, `1.5`, `true`, `"1x"`, `-1`} {
		if _, _, err := read(t, "--config", testkit.File(t, "c.toml", "interval = "+text)); err == nil || !strings.Contains(err.Error(), "interval") {
			t.Errorf("interval = %s: %v", text, err)
		}
	}
	o, _, err := read(t, "--config", testkit.File(t, "c.toml", "count = 7.0\nhttp_address = 7"))
	testkit.Must(t, err)
	testkit.Equal(t, o.count, 7, "a number of no duration")
}

// A refused value is one fault. The default that stays in place causes no second fault.
func TestOneFaultOfAFlagIsSaidOnce(t *testing.T) {
	_, _, err := read(t, "--count=11", "--count=x")
	testkit.Equal(t, fmt.Sprint(err), `--count: "x": want a whole number (for example --count=3)`)
	_, _, err = read(t, "--interval=1")
	testkit.Equal(t, fmt.Sprint(err), `--interval: "1": want a duration with a unit (for example --interval=1s)`)
	_, _, err = read(t, "--config", testkit.File(t, "c.toml", "count = 'y'"), "--count=x")
	testkit.Equal(t, fmt.Sprint(err), `--count: "x": want a whole number (for example --count=3)`)
}
