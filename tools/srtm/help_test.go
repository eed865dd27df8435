package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tools/help"
)

// walk calls visit for a command and all commands below it.
func walk(cmd *cobra.Command, visit func(*cobra.Command)) {
	visit(cmd)
	for _, sub := range cmd.Commands() {
		if sub.IsAvailableCommand() {
			walk(sub, visit)
		}
	}
}

// Every command that does something has an example, and its flags are in groups.
func TestHelpOfEveryCommand(t *testing.T) {
	walk(command(), func(cmd *cobra.Command) {
		var out bytes.Buffer
		cmd.SetOut(&out)
		testkit.Must(t, cmd.Help())
		for line := range strings.Lines(out.String()) {
			if len([]rune(line)) > 101 {
				t.Errorf("%s: a line of %d characters: %s", cmd.CommandPath(), len([]rune(line))-1, line)
			}
		}
		if cmd.Parent() == nil || cmd.Name() == "completion" || cmd.Parent().Name() == "completion" {
			return
		}
		if !cmd.HasSubCommands() && !strings.Contains(cmd.Example, cmd.CommandPath()) {
			t.Errorf("%s: no example of it: %q", cmd.CommandPath(), cmd.Example)
		}
		if f := cmd.Flags().Lookup("tls-ca"); f != nil && !cmd.HasSubCommands() && !strings.Contains(out.String(), "\n"+help.Connection+":\n") {
			t.Errorf("%s: its flags are in no groups:\n%s", cmd.CommandPath(), &out)
		}
	})
}
