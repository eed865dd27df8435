package daemon

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"slices"
	"strings"
)

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

// OneOf returns an error unless the value of the flag is one of the known ones.
func OneOf(flag, value string, known ...string) error {
	if slices.Contains(known, value) {
		return nil
	}
	return fmt.Errorf("--%s %q is none of %s", flag, value, strings.Join(known, ", "))
}

// Within returns an error unless the value of the flag is within its bounds.
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

// canonical returns the name of a flag, or, for an alias, the name of its flag.
func canonical(f *flag.Flag) string {
	if a, ok := f.Value.(*alias); ok {
		return a.of
	}
	return f.Name
}
