package main

import (
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
)

// completeWithin bounds what a shell waits for names.
const completeWithin = 2 * time.Second

// complete says to a shell what may stand for an argument, by the words of a command's
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
	ctx, cancel := context.WithTimeout(cmd.Context(), completeWithin)
	defer cancel()
	c.output = formTable
	// Without an answer there is nothing to offer.
	_ = c.call(ctx, func(x *call) error {
		switch {
		case word == "TOPIC", word == "NAME" && cmd.Name() != "create":
			r, err := x.admin.ListTopics(x.ctx, &srtmv1.ListTopicsRequest{PageSize: 1000})
			for _, t := range r.GetTopics() {
				names = append(names, t.GetSpec().GetName())
			}
			return err
		case word == "BROKER":
			r, err := x.admin.ListBrokers(x.ctx, &srtmv1.ListBrokersRequest{})
			for _, b := range r.GetBrokers() {
				names = append(names, b.GetId())
			}
			return err
		}
		return nil
	})
	return names, cobra.ShellCompDirectiveNoFileComp
}
