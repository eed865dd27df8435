package daemon

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

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
	fs := flag.NewFlagSet("thing", flag.ContinueOnError)
	fs.StringVar(&o.address, "http-address", "x:1", "`host:port`")
	fs.DurationVar(&o.interval, "interval", time.Second, "how often")
	fs.IntVar(&o.count, "count", 3, "how many")
	fs.Var(&o.names, "name", "a name; may be repeated")
	Alias(fs, "name", "names", "its former name")
	err := parse(fs, args, "thing does it.", "thing v1.2.3", argument, &out)
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

// An alias is its flag: the command line wins over the file by either name.
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

// An argument is what its flag is for, also where a value before it looks like one.
func TestArgument(t *testing.T) {
	for want, args := range map[string][]string{
		"a 3": {"a"}, "b 7": {"--count=7", "b"}, "c 8": {"--count", "8", "--name=c"}, " 9": {"--count", "9"},
	} {
		if o, _, err := readWith(t, "name", args...); err != nil || fmt.Sprint(&o.names, " ", o.count) != want {
			t.Errorf("%q: %s %d, %v, want %s", args, &o.names, o.count, err, want)
		}
	}
	for want, args := range map[string][]string{`unexpected argument "a"`: {"a", "b"}, `"": is empty`: {""}} {
		if _, _, err := readWith(t, "name", args...); err == nil || err.Error() != want {
			t.Errorf("%q: %v, want %s", args, err, want)
		}
	}
}

func TestHelpAndVersion(t *testing.T) {
	_, out, err := read(t, "--help")
	testkit.ErrorIs(t, err, errDone, "--help")
	for _, part := range []string{"thing does it.", "Usage: thing [flags]", "-http-address", "-config", "-version"} {
		if !strings.Contains(out, part) {
			t.Errorf("--help does not say %q:\n%s", part, out)
		}
	}
	if _, out, err = read(t, "--version"); !errors.Is(err, errDone) || !strings.HasPrefix(out, "thing v1.2.3\nSRTM ") {
		t.Errorf("--version: %q, %v", out, err)
	}
}

func TestFaults(t *testing.T) {
	for _, test := range []struct {
		name string
		args []string
		want []string
	}{
		{"an unknown flag", []string{"--nope"}, []string{"nope"}},
		{"a bad value", []string{"--count", "x"}, []string{"count", `"x"`}},
		{"an argument", []string{"what"}, []string{`"what"`}},
		{"no such file", []string{"--config", filepath.Join(t.TempDir(), "none.toml")}, []string{"none.toml"}},
		{"no TOML", []string{"--config", testkit.File(t, "c.toml", "a = ")}, []string{"c.toml"}},
		{"everything wrong with the file at once", []string{"--config", testkit.File(t, "c.toml", "nope = 1\ncount = \"x\"\nversion = true\n[name]\na = 1\n")},
			[]string{`unknown setting "nope"`, "count:", `unknown setting "version"`, "name is no plain value"}},
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

func TestWithin(t *testing.T) {
	for n, want := range map[int]string{0: "--count 0: want 1 to 3", 1: "<nil>", 3: "<nil>", 4: "--count 4: want 1 to 3"} {
		testkit.Equal(t, fmt.Sprint(Within("count", n, 1, 3)), want)
	}
}
