// Package host is what the benchmarks have in common: how they read their flags, and
// what they say of the commit and the machine in their results.
package host

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os/exec"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/obs"
)

// Parse reads flags. With --help it prints them to help, and returns flag.ErrHelp.
func Parse(fs *flag.FlagSet, args []string, help io.Writer) error {
	fs.SetOutput(io.Discard) // lifecycle prints the error, once
	err := fs.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		fs.SetOutput(help)
		fmt.Fprintf(help, "Usage: %s [flags]\n", fs.Name())
		fs.PrintDefaults()
	case err == nil && fs.NArg() > 0:
		err = fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	return err
}

// Usage is what a command returns for an error of its flags: nothing, if it was asked
// for help.
func Usage(err error) error {
	if errors.Is(err, flag.ErrHelp) {
		return nil
	}
	return lifecycle.UsageError{Err: err}
}

// Commit is that of the working tree, where there is one.
func Commit(ctx context.Context) string {
	text, err := exec.CommandContext(ctx, "git", "describe", "--always", "--dirty", "--abbrev=12").Output()
	if err != nil {
		return obs.Version()
	}
	return strings.TrimSpace(string(text))
}

// Kernel is the kernel's release.
func Kernel() string {
	var name unix.Utsname
	if unix.Uname(&name) != nil {
		return runtime.GOOS
	}
	return unix.ByteSliceToString(name.Release[:])
}
