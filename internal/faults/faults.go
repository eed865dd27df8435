// Package faults collects all problems of a configuration, so the operator sees them at
// once. Hint names the intended word of a mistyped word.
package faults

import (
	"errors"
	"fmt"
)

// List is a list of faults. The zero List is empty.
type List []error

// If adds a fault if bad is true. The arguments are evaluated in any case.
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
