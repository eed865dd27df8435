// Package host is what the benchmarks have in common: how they read their flags, find
// programs, measure them in turn (rounds.go), ask them for their own figures (web.go), and
// write tables; and what they say of the commit and the machine in their results.
package host

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
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
		fmt.Fprintf(help, "Usage: bench %s [flags]\n", fs.Name())
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

// Commit returns the commit of the working tree. Without a working tree, Commit returns the version.
func Commit(ctx context.Context) string {
	text, err := exec.CommandContext(ctx, "git", "describe", "--always", "--dirty", "--abbrev=12").Output()
	if err != nil {
		return obs.Version()
	}
	return strings.TrimSpace(string(text))
}

// Machine says what results are of, at the beginning of a sentence.
func Machine(ctx context.Context) string {
	return fmt.Sprintf("Commit %s, kernel %s, %d processors, %s", Commit(ctx), Kernel(), runtime.NumCPU(), runtime.Version())
}

// Program is where a program is found, from any folder: most run in one of their own.
func Program(path string) (string, error) {
	found, err := exec.LookPath(path)
	if err != nil {
		return "", err
	}
	return filepath.Abs(found)
}

// WriteJSON writes a file for programs.
func WriteJSON(file string, v any) error {
	text, err := json.MarshalIndent(v, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(text, '\n'), 0o644)
}

// Kernel is the kernel's release.
func Kernel() string {
	var name unix.Utsname
	if unix.Uname(&name) != nil {
		return runtime.GOOS
	}
	return unix.ByteSliceToString(name.Release[:])
}
