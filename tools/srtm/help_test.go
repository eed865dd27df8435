package main

import (
	"bytes"
	"maps"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

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

// Every command with an action has an example, and its flags are in groups.
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

// Every flag for host:port accepts a host alone, and its help names the default port.
func TestDefaultPorts(t *testing.T) {
	ports := map[string]string{}
	walk(command(), func(cmd *cobra.Command) {
		cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if name, _ := pflag.UnquoteUsage(f); name != "host:port" {
				return
			}
			testkit.Must(t, f.Value.Set("a.example"))
			_, port, _ := strings.Cut(f.Value.String(), "a.example:")
			if port == "" || !strings.Contains(f.Usage, "(default port "+port+")") {
				t.Errorf("%s --%s: a host alone is %q; its help: %s", cmd.CommandPath(), f.Name, f.Value, f.Usage)
			}
			if before, is := ports[f.Name]; is && before != port {
				t.Errorf("%s --%s: port %s, elsewhere %s", cmd.CommandPath(), f.Name, port, before)
			}
			ports[f.Name] = port
		})
	})
	want := map[string]string{
		"loaddistributor-address": "4170", "admission-address": "4192", "gateway-address": "4196", "nsqd-tcp-address": "4150", "nsqd-http-address": "4151",
		"tcp-address": "4150", "http-address": "4190", // of the agent
	}
	if !maps.Equal(ports, want) {
		t.Errorf("default ports %v, want %v", ports, want)
	}
}
