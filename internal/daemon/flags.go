package daemon

import (
	"errors"
	"flag"
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

// NSQName is the reason for an alias that NSQ's configuration files use.
const NSQName = "its name in NSQ's configuration files"

// Alias adds a second name to a flag, with the reason for the help.
func Alias(fs *flag.FlagSet, name, original, why string) {
	fs.Var(&alias{fs.Lookup(name).Value, name}, original, "as --"+name+": "+why)
}

type alias struct {
	flag.Value
	original string
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
		return a.original
	}
	return f.Name
}
