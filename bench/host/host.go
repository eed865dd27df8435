// Package host holds the common parts of the benchmarks. It parses flags, finds programs,
// measures subjects in rounds (rounds.go), fetches metrics (web.go), and writes tables. It
// also describes the commit and the machine for the results.
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

	"github.com/srtm-io/srtm/internal/program"
)

// Parse parses flags. With --help, Parse prints the usage to help and returns flag.ErrHelp.
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

// Usage returns the error of a command with invalid flags, or nil after --help.
func Usage(err error) error {
	if errors.Is(err, flag.ErrHelp) {
		return nil
	}
	return program.UsageError{Err: err}
}

// Commit returns the commit of the working tree, or the version without a working tree.
func Commit(ctx context.Context) string {
	text, err := exec.CommandContext(ctx, "git", "describe", "--always", "--dirty", "--abbrev=12").Output()
	if err != nil {
		return program.Version()
	}
	return strings.TrimSpace(string(text))
}

// Machine describes commit and machine, for the beginning of a sentence.
func Machine(ctx context.Context) string {
	return fmt.Sprintf("Commit %s, kernel %s, %d processors, %s", Commit(ctx), Kernel(), runtime.NumCPU(), runtime.Version())
}

// Program returns the absolute path of a program, since most programs run in their own
// folder.
func Program(path string) (string, error) {
	program, err := exec.LookPath(path)
	if err != nil {
		return "", err
	}
	return filepath.Abs(program)
}

// WriteJSON writes v to a file as JSON.
func WriteJSON(file string, v any) error {
	text, err := json.MarshalIndent(v, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(text, '\n'), 0o644)
}

// Kernel returns the kernel release.
func Kernel() string {
	var name unix.Utsname
	if unix.Uname(&name) != nil {
		return runtime.GOOS
	}
	return unix.ByteSliceToString(name.Release[:])
}
