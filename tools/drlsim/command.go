package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/srtm-io/srtm/internal/obs"
)

// usageError is a mistake on the command line, exit code 2.
type usageError struct{ err error }

func (e usageError) Error() string { return e.err.Error() }
func (e usageError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// exitCode is 0 without an error, 2 for a usageError and 1 for any other.
func exitCode(err error) int {
	switch {
	case err == nil:
		return 0
	case errors.As(err, new(usageError)):
		return 2
	}
	return 1
}

// The forms of output.
const (
	formJSON  = "json"
	formTable = "table"
)

// command returns the command tree, fresh: cobra keeps state in it.
func command() *cobra.Command {
	root := &cobra.Command{
		Use:   "drlsim",
		Short: "What a rate limit costs in access delay, on paper",
		Long: `drlsim says what a contract (rate, burst) costs in access delay, the wait for a
token: by theory for Poisson arrivals, by replaying recorded arrivals, whole or
split over several brokers, or by simulating brokers and publishers. It touches no
cluster. The same input and seed give the same bytes.

Exit code: 0; 1 if the input is bad; 2 if the command line is.`,
		Version:       obs.Version(),
		Args:          noArguments,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetVersionTemplate("drlsim, {{.Version}}\n")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.CompletionOptions.DisableDefaultCmd = true
	root.AddCommand(theoryCommand(), bucketCommand(), sharesCommand(), runCommand(), fitCommand(), convergenceCommand(), scaleCommand())
	return root
}

func noArguments(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if cmd.HasSubCommands() {
		var names []string
		for _, c := range cmd.Commands() {
			names = append(names, c.Name())
		}
		return usagef("unknown command %q: there are %s", args[0], strings.Join(names, ", "))
	}
	return usagef("%s takes no argument, only flags: %q", cmd.Name(), args[0])
}

// outputFlag adds --output to cmd.
func outputFlag(cmd *cobra.Command, form *string) {
	cmd.Flags().StringVar(form, "output", formJSON, "`form` of the output: json or table")
}

func checkForm(form string) error {
	if form != formJSON && form != formTable {
		return fmt.Errorf("unknown output %q: there are json, table", form)
	}
	return nil
}

// required returns an error that names those of the flags that were not given.
func required(cmd *cobra.Command, names ...string) error {
	missing := slices.DeleteFunc(names, func(name string) bool { return cmd.Flags().Changed(name) })
	if len(missing) == 0 {
		return nil
	}
	return errors.New("missing --" + strings.Join(missing, ", --"))
}

// writeJSON writes v on one line.
func writeJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	return nil
}
