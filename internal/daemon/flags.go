package daemon

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"slices"
	"strings"
)

// List is a repeatable flag.
type List []string

func (l *List) String() string { return strings.Join(*l, ",") }

// Set appends a value.
func (l *List) Set(s string) error {
	if s == "" {
		return errors.New("is empty")
	}
	*l = append(*l, s)
	return nil
}

// OneOf returns an error unless the flag's value is one of known.
func OneOf(flag, value string, known ...string) error {
	if slices.Contains(known, value) {
		return nil
	}
	return fmt.Errorf("--%s %q is none of %s", flag, value, strings.Join(known, ", "))
}

// Within returns an error unless the flag's value is within its bounds.
func Within[T cmp.Ordered](flag string, value, low, high T) error {
	if value < low || value > high {
		return fmt.Errorf("--%s %v: want %v to %v", flag, value, low, high)
	}
	return nil
}

// Alias adds a second name to a flag, with the reason for the help.
func Alias(fs *flag.FlagSet, name, other, why string) {
	fs.Var(&alias{fs.Lookup(name).Value, name}, other, "as --"+name+": "+why)
}

type alias struct {
	flag.Value
	of string
}

func (a *alias) String() string {
	if a.Value == nil { // package flag also calls String on the zero value
		return ""
	}
	return a.Value.String()
}

func (a *alias) IsBoolFlag() bool {
	b, ok := a.Value.(interface{ IsBoolFlag() bool })
	return ok && b.IsBoolFlag()
}

// canonical returns the name of a flag, or the name of an alias's flag.
func canonical(f *flag.Flag) string {
	if a, ok := f.Value.(*alias); ok {
		return a.of
	}
	return f.Name
}
