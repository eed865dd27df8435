// Package program has what each of our programs has: a version, the errors that say with which
// code a program exits, and the form in which a program prints an error.
package program

import (
	"fmt"
	"io"
	"strings"
)

// UsageError marks an error of the caller: a bad flag or configuration.
type UsageError struct{ Err error }

func (e UsageError) Error() string { return e.Err.Error() }
func (e UsageError) Unwrap() error { return e.Err }

// ExitError carries an exit code other than 1, for tools with meaningful codes (srtm
// plan: 3 is infeasible). If Err is nil, nothing is printed.
type ExitError struct {
	Code int
	Err  error
}

func (e ExitError) Error() string {
	if e.Err == nil {
		return fmt.Sprintf("exit code %d", e.Code)
	}
	return e.Err.Error()
}
func (e ExitError) Unwrap() error { return e.Err }

// PrintError writes "name: error" in one write, with a line for each of several joined
// errors. Text from others is made printable.
func PrintError(w io.Writer, name string, err error) {
	prefix := name + ": "
	fmt.Fprintln(w, prefix+strings.ReplaceAll(Printable(err.Error()), "\n", "\n"+prefix))
}
