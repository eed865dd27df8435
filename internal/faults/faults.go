// Package faults collects what is wrong with a configuration, so that who gave it is
// told all of it at once. It knows nothing of configurations.
package faults

import (
	"errors"
	"fmt"
)

// List is what was found so far. The zero List is empty.
type List []error

// If adds a fault if there is one; the arguments are evaluated in any case.
func (l *List) If(bad bool, format string, args ...any) {
	if bad {
		*l = append(*l, fmt.Errorf(format, args...))
	}
}

// Add adds an error, unless it is nil.
func (l *List) Add(err error) {
	if err != nil {
		*l = append(*l, err)
	}
}

// Err returns all faults, joined; nil if there is none.
func (l List) Err() error { return errors.Join(l...) }
