// Package help gives commands of cobra our form of --help: lines of at most 100 characters,
// and flags and subcommands in groups. It knows no command.
package help

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/srtm-io/srtm/internal/program"
)

// Width is the maximum length of a line of --help.
const Width = 100

// Connection is the title of the flags by which to reach a server.
const Connection = "Connection and output"

// groupKey is the annotation with a flag's group. A flag without the annotation is in Flags.
const groupKey = "srtm_group"

// connectionFlags are the flags of the group Connection.
var connectionFlags = []string{
	"loaddistributor-address", "admission-address", "gateway-address", "nsqd-tcp-address", "nsqd-http-address", "nsq-opt", "auth-secret-file",
	"tls-ca", "tls-cert", "tls-key", "token-file", "nsqd-tls-ca", "nsqd-tls-cert", "nsqd-tls-key", "nsqd-token-file", "output", "timeout",
}

// flagGroup is flags under a title, as --help prints them.
type flagGroup struct{ Title, Usages string }

// flagGroups returns the flags of a command in groups. The group Flags comes first.
func flagGroups(cmd *cobra.Command) (groups []flagGroup) {
	for _, title := range []string{"Flags", Connection} {
		fs := pflag.NewFlagSet("", pflag.ContinueOnError)
		cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
			group := "Flags"
			if is := f.Annotations[groupKey]; len(is) == 1 {
				group = is[0]
			}
			if group == title && f.Name != "help" {
				fs.AddFlag(f)
			}
		})
		if usages := fs.FlagUsagesWrapped(Width); usages != "" {
			groups = append(groups, flagGroup{title, strings.TrimRight(usages, "\n")})
		}
	}
	return groups
}

// commandGroup is commands under a title.
type commandGroup struct {
	Title    string
	Commands []*cobra.Command
}

// commandGroups returns the subcommands in the order of their groups.
func commandGroups(cmd *cobra.Command) (groups []commandGroup) {
	of := map[string]int{}
	for _, g := range cmd.Groups() {
		of[g.ID] = len(groups)
		groups = append(groups, commandGroup{Title: g.Title})
	}
	rest := commandGroup{Title: "Commands"}
	for _, sub := range cmd.Commands() {
		if !sub.IsAvailableCommand() {
			continue
		}
		if i, in := of[sub.GroupID]; in {
			groups[i].Commands = append(groups[i].Commands, sub)
		} else {
			rest.Commands = append(rest.Commands, sub)
		}
	}
	if len(groups) > 0 {
		rest.Title = "Other commands"
	}
	if len(rest.Commands) > 0 {
		groups = append(groups, rest)
	}
	return groups
}

// usage prints the usage of cmd. With a template instead of this function, the linker would keep
// every exported method of a program.
func usage(cmd *cobra.Command) error {
	var text strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&text, format+"\n", args...) }
	line("Usage:")
	if cmd.HasAvailableSubCommands() {
		line("  %s COMMAND", cmd.CommandPath())
	} else {
		line("  %s", cmd.UseLine())
	}
	if cmd.HasExample() {
		line("\nExamples:\n%s", cmd.Example)
	}
	for _, g := range commandGroups(cmd) {
		line("\n%s:", g.Title)
		for _, sub := range g.Commands {
			line("  %-*s %s", sub.NamePadding(), sub.Name(), sub.Short)
		}
	}
	for _, g := range flagGroups(cmd) {
		line("\n%s:\n%s", g.Title, g.Usages)
	}
	if cmd.HasAvailableSubCommands() {
		line("\n%s COMMAND --help explains a command.", cmd.CommandPath())
	}
	_, err := io.WriteString(cmd.OutOrStderr(), text.String())
	return err
}

// addVersion gives the program the flag --version. The command prints help if it is run without
// a subcommand and without --version.
func addVersion(root *cobra.Command) {
	version := root.Flags().BoolP("version", "v", false, "print the version and exit")
	root.RunE = func(cmd *cobra.Command, _ []string) error {
		if !*version {
			return cmd.Help()
		}
		_, err := fmt.Fprintf(cmd.OutOrStdout(), "%s, %s\n", root.Name(), program.Version())
		return err
	}
}

// Root returns the command of a program whose subcommands take only flags. Root prints no
// errors.
func Root(name, short, long string, commands ...*cobra.Command) *cobra.Command {
	root := &cobra.Command{
		Use: name, Short: short, Long: long, SilenceUsage: true, SilenceErrors: true,
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return program.UsageError{Err: err} })
	root.CompletionOptions.DisableDefaultCmd = true
	root.AddCommand(commands...)
	for _, cmd := range append(commands, root) {
		cmd.Args = noArguments
	}
	Use(root)
	return root
}

func noArguments(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	err := fmt.Errorf("%s takes no argument, only flags: %q", cmd.Name(), args[0])
	if cmd.HasSubCommands() {
		var names []string
		for _, c := range cmd.Commands() {
			names = append(names, c.Name())
		}
		err = fmt.Errorf("unknown command %q: there are %s", args[0], strings.Join(names, ", "))
	}
	return program.UsageError{Err: err}
}

// Use gives a program's command and its subcommands our form of --help and --version.
func Use(root *cobra.Command) {
	addVersion(root)
	root.SetUsageFunc(usage)
	group(root)
}

// group puts the flags of a command and its subcommands into groups, and adds the ports of
// addresses.
func group(cmd *cobra.Command) {
	cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
		if address, is := f.Value.(interface{ DefaultPort() string }); is {
			f.Usage += " (default port " + address.DefaultPort() + ")"
		}
	})
	for _, name := range connectionFlags {
		if f := cmd.LocalFlags().Lookup(name); f != nil {
			f.Annotations = map[string][]string{groupKey: {Connection}}
		}
	}
	for _, sub := range cmd.Commands() {
		group(sub)
	}
}
