package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/srtm-io/srtm/internal/faults"
)

// checkLine returns all faults of a command line. If all flags parse, checkLine returns
// nil and leaves arguments and the meaning of values to the command. Otherwise it adds
// the command's own checks of these.
func checkLine(root *cobra.Command, args []string) error {
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd(args...)
	cmd, rest, err := root.Find(args)
	if err != nil || cmd.DisableFlagParsing || slices.Contains(rest, "--help") || slices.Contains(rest, "-h") || slices.Contains([]string{cobra.ShellCompRequestCmd, cobra.ShellCompNoDescRequestCmd}, first(args)) {
		return nil // the command's execution reports it
	}
	if word := first(rest); cmd.HasAvailableSubCommands() && word != "" && !strings.HasPrefix(word, "-") {
		return unknownCommand(cmd, word)
	}
	cmd.InitDefaultHelpFlag()
	cmd.InitDefaultVersionFlag()
	var all faults.List
	bad := map[string]bool{}
	for range len(args) + 1 {
		err := cmd.ParseFlags(rest)
		if err == nil {
			break
		}
		text, flag, from, n := flagFault(cmd, err, rest)
		all.If(true, "%s", text)
		bad[flag] = true
		if n == 0 {
			return all.Err()
		}
		rest = slices.Delete(slices.Clone(rest), from, from+n)
		root = command() // flags keep their values
		path := strings.Fields(cmd.CommandPath())[1:]
		if cmd, _, err = root.Find(path); err != nil {
			return all.Err()
		}
	}
	if len(all) == 0 {
		return nil
	}
	argsErr := cmd.ValidateArgs(cmd.Flags().Args())
	if argsErr == nil && cmd.PreRunE != nil {
		argsErr = cmd.PreRunE(cmd, cmd.Flags().Args())
	}
	if argsErr != nil && !slices.ContainsFunc(strings.Fields(argsErr.Error()), func(word string) bool {
		return bad[strings.Trim(strings.TrimPrefix(word, "--"), ":;,")]
	}) {
		all.Add(argsErr)
	}
	return all.Err()
}

func first(args []string) string {
	if len(args) == 0 {
		return ""
	}
	return args[0]
}

// flagFault explains an error of pflag. It returns the flag, and the n words of the line,
// starting at from, that caused the error.
func flagFault(cmd *cobra.Command, err error, line []string) (text, flag string, from, n int) {
	var unknown *pflag.NotExistError
	var value *pflag.InvalidValueError
	var missing *pflag.ValueRequiredError
	var syntax *pflag.InvalidSyntaxError
	words := func(name string, has func(rest string) bool) {
		for i, word := range line {
			flagText, rest, joined := strings.Cut(strings.TrimLeft(word, "-"), "=")
			if !strings.HasPrefix(word, "-") || flagText != name {
				continue
			}
			n = 1
			if !joined && i+1 < len(line) && !strings.HasPrefix(line[i+1], "-") {
				rest, n = line[i+1], 2
			}
			if from = i; has(rest) {
				return
			}
		}
	}
	always := func(string) bool { return true }
	switch {
	case errors.As(err, &unknown):
		flag = unknown.GetSpecifiedName()
		var names []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
		words(flag, always)
		return fmt.Sprintf("--%s: %s has no such flag%s", flag, cmd.CommandPath(), faults.Hint("--", flag, names)), faults.Nearest(flag, names), from, n
	case errors.As(err, &value):
		f := value.GetFlag()
		words(f.Name, func(rest string) bool { return rest == value.GetValue() })
		if f.NoOptDefVal != "" && n == 2 {
			n = 1 // such a flag takes no separate value
		}
		what := fmt.Sprintf("--%s %q: %s", f.Name, value.GetValue(), wantedOf(f))
		if wantedOf(f) == "" {
			what = fmt.Sprintf("--%s: %v", f.Name, value.Unwrap()) // the value's error is complete
		}
		return what + forExample(f), f.Name, from, n
	case errors.As(err, &missing):
		f := missing.GetFlag()
		words(f.Name, always)
		return fmt.Sprintf("--%s: has no value%s", f.Name, forExample(f)), f.Name, from, n
	case errors.As(err, &syntax):
		from = slices.Index(line, syntax.GetSpecifiedFlag())
		return err.Error(), "", max(from, 0), min(from+1, 1)
	}
	return err.Error(), "", 0, 0
}

// wantedOf describes the valid values of a flag; "" if the type does not determine them.
func wantedOf(f *pflag.Flag) string {
	switch kind := f.Value.Type(); kind {
	case "bool":
		return "want true or false"
	case "int", "int32", "int64":
		return "want a whole number"
	case "uint", "uint16", "uint32", "uint64":
		return "want a whole number, not negative"
	case "float64":
		return "want a number"
	case "duration":
		return "want a duration with a unit"
	}
	return ""
}

// forExample returns an example to append to a flag's fault.
func forExample(f *pflag.Flag) string {
	example := f.DefValue
	if slices.Contains([]string{"", "0", "0s", "[]"}, example) {
		if example = map[string]string{"duration": "30s", "bool": "true"}[f.Value.Type()]; strings.Contains(f.Value.Type(), "int") || f.Value.Type() == "float64" {
			example = "100"
		}
	}
	if example == "" {
		return ""
	}
	return " (for example --" + f.Name + "=" + example + ")"
}

// unknownCommand reports that a command has no such subcommand.
func unknownCommand(cmd *cobra.Command, name string) error {
	var names []string
	for _, sub := range cmd.Commands() {
		if sub.IsAvailableCommand() {
			names = append(names, sub.Name())
		}
	}
	hint := faults.Hint(cmd.CommandPath()+" ", name, names)
	if hint == "" {
		hint = "; want one of " + strings.Join(names, ", ")
	}
	return usagef("%q: %s has no such command%s", name, cmd.CommandPath(), hint)
}

func firstLine(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	return line
}
