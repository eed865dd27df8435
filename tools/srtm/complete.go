package main

import (
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tbadaptor/share"
)

// completeWithin limits a shell's wait for names.
const completeWithin = 2 * time.Second

// complete returns completions for an argument, selected by the word in the command's
// Use: topics for TOPIC and NAME, brokers for BROKER, files for FILE.
func (c *cli) complete(cmd *cobra.Command, args []string, _ string) (names []string, directive cobra.ShellCompDirective) {
	words := strings.Fields(cmd.Use)[1:]
	if len(words) == 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	last := words[len(words)-1]
	if len(args) >= len(words) && !strings.HasSuffix(last, "...]") {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	word := strings.Trim(words[min(len(args), len(words)-1)], "[].")
	if word == "FILE" {
		return nil, cobra.ShellCompDirectiveDefault
	}
	if word == "NAME" && cmd.Name() != "create" {
		word = "TOPIC"
	}
	return c.names(cmd, word, args), cobra.ShellCompDirectiveNoFileComp
}

// names returns the existing names of a kind: TOPIC, CHANNEL (of the topic in the first
// argument) or BROKER. Without an answer it returns nothing.
func (c *cli) names(cmd *cobra.Command, kind string, args []string) (names []string) {
	ctx, cancel := context.WithTimeout(cmd.Context(), completeWithin)
	defer cancel()
	c.output = formTable
	_ = c.call(ctx, func(x *call) error {
		switch {
		case kind == "TOPIC":
			r, err := x.admin.ListTopics(x.ctx, &srtmv1.ListTopicsRequest{PageSize: 1000})
			for _, t := range r.GetTopics() {
				names = append(names, t.GetSpec().GetName())
			}
			return err
		case kind == "CHANNEL" && len(args) > 0:
			var err error
			names, err = x.channelNames(x.ctx, args[0])
			return err
		case kind == "BROKER":
			r, err := x.admin.ListBrokers(x.ctx, &srtmv1.ListBrokersRequest{})
			for _, b := range r.GetBrokers() {
				names = append(names, b.GetId())
			}
			return err
		}
		return nil
	})
	return names
}

// flagValues lists the values of flags with few values.
var flagValues = map[string][]string{
	"output": {formTable, formJSON}, "over-limit": {"delay", "reject"}, "policy": placement.Policies(), "share-rule": share.Rules(),
	"durability": {"memory", "fsync", "replicated"}, "pacing": {"off", "advise", "police"}, "resend": {"orderly", "always", "never"},
	"log-level": {"debug", "info", "warn", "error"}, "log-format": {"text", "json"},
}

// offerValues registers completions for flag values.
func offerValues(cmd *cobra.Command) {
	for flag, values := range flagValues {
		if _, has := cmd.GetFlagCompletionFunc(flag); !has && cmd.LocalFlags().Lookup(flag) != nil {
			offer(cmd, flag, values...)
		}
	}
}

// flagNames maps command and flag to the kind of name that the flag takes.
var flagNames = map[[2]string]string{{"move", "to"}: "BROKER", {"move", "from"}: "BROKER", {"seek", "broker"}: "BROKER", {"tail", "channel"}: "CHANNEL"}

// cliOf returns the server settings from a command's flags.
func cliOf(cmd *cobra.Command) *cli {
	text := func(flag string) string {
		value, _ := cmd.Flags().GetString(flag) // "" if the flag does not exist
		return value
	}
	c := &cli{addressFlag: "loaddistributor-address", address: text("loaddistributor-address"), output: formTable, timeout: completeWithin}
	c.trust.CAFile, c.trust.CertFile, c.trust.KeyFile, c.trust.TokenFile = text("tls-ca"), text("tls-cert"), text("tls-key"), text("token-file")
	return c
}

// offerNames registers completions for flags that take names.
func offerNames(cmd *cobra.Command) {
	for of, kind := range flagNames {
		if of[0] != cmd.Name() || cmd.Flags().Lookup(of[1]) == nil {
			continue
		}
		err := cmd.RegisterFlagCompletionFunc(of[1], func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			return cliOf(cmd).names(cmd, kind, args), cobra.ShellCompDirectiveNoFileComp
		})
		if err != nil {
			panic(err) // the flag already has a completion
		}
	}
}
