package main

import (
	"strings"

	"github.com/spf13/cobra"

	"github.com/srtm-io/srtm/tools/help"
)

// examplesOf lists short examples, by command path.
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

// useHelp sets our help format, with examples, for a command and its subcommands.
func useHelp(root *cobra.Command) {
	help.Use(root)
	arrange(root)
}

// arrange adds examples and completion to a command and its subcommands.
func arrange(cmd *cobra.Command) {
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

// offer registers completions for the values of a flag.
func offer(cmd *cobra.Command, flag string, values ...string) {
	if err := cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(err) // the flag is missing or already has a completion
	}
}
