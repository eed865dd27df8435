package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/tools/help"
	"github.com/srtm-io/srtm/tools/sim/scenario"
)

func usage(err error) error { return program.UsageError{Err: err} }

func usagef(format string, args ...any) error { return usage(fmt.Errorf(format, args...)) }

// exitCode is 0 without an error, 2 for a mistake on the command line and 1 for any other.
func exitCode(err error) int {
	switch {
	case err == nil:
		return 0
	case errors.As(err, new(program.UsageError)):
		return 2
	}
	return 1
}

// The forms of output.
const (
	formJSON  = "json"
	formTable = "table"
)

// command returns a new command tree, because cobra keeps state in the tree.
func command() *cobra.Command {
	return help.Root("drlsim", "What a rate limit costs in access delay, on paper",
		`drlsim says what a contract (rate, burst) costs in access delay, the wait for a
token: by theory for Poisson arrivals, by replaying recorded arrivals, whole or
split over several brokers, or by simulating brokers and publishers. It touches no
cluster. The same input and seed give the same bytes.

Exit code: 0; 1 if the input is bad; 2 if the command line is.`,
		theoryCommand(), bucketCommand(), runCommand(), fitCommand(), convergenceCommand(), mqosCommand(), linkCommand())
}

// answer is the output of a command: objects, one per line, or a table.
type answer struct {
	objects []any
	table   func(io.Writer) error
}

// answered returns an answer with one object per result.
func answered[R any](table func(io.Writer, []R) error, results ...R) answer {
	a := answer{table: func(w io.Writer) error { return table(w, results) }}
	for _, r := range results {
		a.objects = append(a.objects, r)
	}
	return a
}

// leaf makes cmd a command without arguments that prints the answer of run in the form of
// --output. needs lists the required flags.
func leaf(cmd *cobra.Command, run func(*cobra.Command) (answer, error), needs ...string) *cobra.Command {
	var form string
	cmd.Flags().StringVar(&form, "output", formJSON, "`form` of the output: json or table")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := required(cmd, needs...); err != nil {
			return usage(err)
		}
		if form != formJSON && form != formTable {
			return usagef("unknown output %q: there are json, table", form)
		}
		a, err := run(cmd)
		if err != nil {
			return err
		}
		if form == formTable {
			return a.table(cmd.OutOrStdout())
		}
		for _, object := range a.objects {
			if err := writeJSON(cmd.OutOrStdout(), object); err != nil {
				return err
			}
		}
		return nil
	}
	return cmd
}

// grid prints a table. align has flags of package tabwriter.
func grid(w io.Writer, align uint, fill func(row func(format string, cells ...any))) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', align)
	fill(func(format string, cells ...any) { fmt.Fprintf(tw, format+"\n", cells...) })
	if err := tw.Flush(); err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	return nil
}

// scenarioFlags adds --scenario and --seed to cmd, and returns a function that reads the
// scenario.
func scenarioFlags(cmd *cobra.Command) func() (*scenario.Scenario, error) {
	var file string
	var seed uint64
	cmd.Flags().StringVar(&file, "scenario", "", "`file` of the scenario, or - for standard input")
	cmd.Flags().Uint64Var(&seed, "seed", 1, "`number` that decides all random choices, in place of the scenario's")
	return func() (s *scenario.Scenario, err error) {
		if file == "-" {
			s, err = scenario.Read(cmd.InOrStdin())
		} else {
			s, err = scenario.ReadFile(file)
		}
		if err == nil && cmd.Flags().Changed("seed") {
			s.Seed = seed
		}
		return s, err
	}
}

// required returns an error with the names of missing flags.
func required(cmd *cobra.Command, names ...string) error {
	missing := slices.DeleteFunc(names, func(name string) bool { return cmd.Flags().Changed(name) })
	if len(missing) == 0 {
		return nil
	}
	return errors.New("missing --" + strings.Join(missing, ", --"))
}

func writeJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	return nil
}
