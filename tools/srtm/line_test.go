package main

import (
	"errors"
	"testing"

	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/testkit"
)

// The error names all faults of a command line at once, and the right form of each.
func TestFaultsOfTheCommandLine(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"topic", "create", "t", "--rat=5", "--burst=x", "--timeout", "3", "--slo-quantile="},
			"--rat: srtm topic create has no such flag; did you mean --rate?\n" +
				"--burst \"x\": want a whole number (for example --burst=100)\n" +
				"--timeout \"3\": want a duration with a unit (for example --timeout=30s)\n" +
				"--slo-quantile \"\": want a number (for example --slo-quantile=0.99)"},
		{[]string{"topic", "create", "--rate=fast", "--over-limit=drop", "t"},
			"--rate \"fast\": want a number (for example --rate=100)\n--over-limit \"drop\" is neither delay nor reject"},
		{[]string{"topic", "crate", "t"}, `"crate": srtm topic has no such command; did you mean srtm topic create?`},
		{[]string{"tpoic"}, `"tpoic": srtm has no such command; did you mean srtm topic?`},
		{[]string{"gateway", "start"}, `"start": srtm gateway has no such command; want one of status`},
		{[]string{"topic", "list", "t"}, `"t": srtm topic list takes no arguments, only flags; see srtm topic list --help`},
		{[]string{"topic", "describe"}, "srtm topic describe: want one topic name, got 0 arguments; for example:\n  srtm topic describe orders"},
		{[]string{"topic", "move", "t"}, "--to is missing: it names the broker (for example --to=b2)\n" +
			"which publishers? want --all, --group, --from or --publisher-id (for example --publisher-id=north.7)"},
		{[]string{"topic", "move", "t", "--to=b", "--all", "--from=c"}, "--all goes with neither --group nor --from"},
		{[]string{"topic", "move", "t", "--to=b", "--all", "--publisher-id=c"}, "--publisher-id goes with none of --all, --group and --from"},
	} {
		_, _, err := srtm(t, "127.0.0.1:1", c.args...)
		if err == nil || err.Error() != c.want || !errors.As(err, new(program.UsageError)) {
			t.Errorf("%q:\n%v\nwant\n%s", c.args, err, c.want)
		}
	}
}

// Commands that cobra adds are known.
func TestHelpCommand(t *testing.T) {
	for _, args := range [][]string{{"help", "topic", "create"}, {"topic", "create", "--help"}, {"topic"}, {}, {"--version"}, {"topic", "help"}} {
		if out, _, err := srtm(t, "", args...); err != nil && args[0] != "topic" || err == nil && out == "" {
			t.Errorf("%q: %q, %v", args, out, err)
		}
	}
}

func TestMoveSelectsPublishers(t *testing.T) {
	a := &admin{}
	address := serve(t, a)
	for _, c := range []struct {
		args  []string
		group string
		from  string
		all   bool
	}{{[]string{"--all"}, "none", "", true}, {[]string{"--group="}, "", "", false}, {[]string{"--group", "north", "--from=b1"}, "north", "b1", false}, {[]string{"--from=b1"}, "none", "b1", false}} {
		_, _, err := srtm(t, address, append([]string{"topic", "move", "sensors", "--to", "b2"}, c.args...)...)
		testkit.Must(t, err)
		group := "none"
		if a.moved.Group != nil {
			group = *a.moved.Group
		}
		if group != c.group || a.moved.FromBrokerId != c.from || a.moved.All != c.all || a.moved.BrokerId != "b2" {
			t.Errorf("%q: sent %v", c.args, a.moved)
		}
	}
}

func TestFieldsAreNamedByTheirFlags(t *testing.T) {
	for field, want := range map[string]string{
		"spec.contract.rate_milli": "--rate", "spec.contract.slo.latency": "--slo-latency", "spec.groups[2].rate": "--group, number 3, rate",
		"spec.publishers[0].correlation_key": "--publisher, number 1, correlation key", "spec.channels[1]": "--channel, number 2", "spec.share_rule": "--share-rule",
		"spec.auto.max_burst": "--auto-burst", "page_token": "page_token",
	} {
		testkit.Equal(t, flagOf(field), want, field)
	}
}
