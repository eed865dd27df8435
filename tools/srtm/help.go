package main

import (
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// helpWidth is the maximum length of a line of --help.
const helpWidth = 100

// connection is the title of the flags of every command that talks to a server.
const connection = "Connection and output"

// groupKey is the annotation with a flag's group; without one the flag is in Flags.
const groupKey = "srtm_group"

// connectionFlags are the flags of the group connection, of every command that has them.
var connectionFlags = []string{
	"loaddistributor-address", "admission-address", "nsqd-tcp-address", "nsqd-http-address", "nsq-opt", "auth-secret-file",
	"tls-ca", "tls-cert", "tls-key", "token-file", "nsqd-tls-ca", "nsqd-tls-cert", "nsqd-tls-key", "nsqd-token-file", "output", "timeout",
}

// examplesOf are the examples of commands that have no more to show, by the path of the command.
var examplesOf = map[string]string{
	"admission ask":            "user/17",
	"admission partition list": "",
	"admission rule delete":    "user/17",
	"admission rule get":       "user/17",
	"admission rule import":    "rules.csv",
	"admission rule list":      "",
	"agent":                    "--loaddistributor-address ld.example.com --publisher-id host1",
	"broker calibrate":         "b1",
	"broker capacity":          "b1 --mcap 15000",
	"broker drain":             "b1 --wait --timeout 10m",
	"broker list":              "",
	"broker remove":            "b1",
	"channel peek":             "orders billing --count 3",
	"cluster export":           "> cluster.json",
	"cluster import":           "cluster.json",
	"gateway status":           "",
	"plan":                     "--rate 11000 --burst 30 --brokers 3 --mcap 5000",
	"share forget":             "b1",
	"share history":            "orders --last 10",
	"share list":               "orders",
	"topic delete":             "orders",
	"topic describe":           "orders",
	"topic list":               "--output json",
	"topic watch":              "orders",
}

// flagGroup is flags under a title, as --help prints them.
type flagGroup struct{ Title, Usages string }

// flagGroups returns the flags of a command in groups: those of the command first.
func flagGroups(cmd *cobra.Command) (groups []flagGroup) {
	for _, title := range []string{"Flags", connection} {
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
		if usages := fs.FlagUsagesWrapped(helpWidth); usages != "" {
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

const usageTemplate = `Usage:{{if .HasAvailableSubCommands}}
  {{.CommandPath}} COMMAND{{else}}
  {{.UseLine}}{{end}}{{if .HasExample}}

Examples:
{{.Example}}{{end}}{{range commandGroups .}}

{{.Title}}:{{range .Commands}}
  {{rpad .Name .NamePadding}} {{.Short}}{{end}}{{end}}{{range flagGroups .}}

{{.Title}}:
{{.Usages}}{{end}}{{if .HasAvailableSubCommands}}

{{.CommandPath}} COMMAND --help explains a command.{{end}}
`

// useHelp gives a command and its subcommands our form of --help.
func useHelp(root *cobra.Command) {
	cobra.AddTemplateFunc("flagGroups", flagGroups)
	cobra.AddTemplateFunc("commandGroups", commandGroups)
	root.SetUsageTemplate(usageTemplate)
	arrange(root)
}

// arrange groups the flags of a command and its subcommands, and adds examples.
func arrange(cmd *cobra.Command) {
	for _, name := range connectionFlags {
		if f := cmd.LocalFlags().Lookup(name); f != nil {
			f.Annotations = map[string][]string{groupKey: {connection}}
		}
	}
	path := strings.TrimPrefix(cmd.CommandPath(), cmd.Root().Name()+" ")
	if example, is := examplesOf[path]; is && cmd.Example == "" {
		cmd.Example = strings.TrimRight("  "+cmd.CommandPath()+" "+example, " ")
	}
	offerValues(cmd)
	offerNames(cmd)
	for _, sub := range cmd.Commands() {
		arrange(sub)
	}
}

// offer has a shell complete the values of a flag.
func offer(cmd *cobra.Command, flag string, values ...string) {
	if err := cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(err) // the flag is not there, or has values already
	}
}
