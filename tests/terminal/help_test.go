package terminal

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

func TestMain(m *testing.M) { localtest.Main(m) }

// maxLine is the maximum length of a line of --help.
const maxLine = 100

// help returns a command's output. The command must succeed and print no long lines.
func help(t *testing.T, program string, args ...string) string {
	t.Helper()
	text, code := localtest.Command(t, program, args...)
	if code != 0 {
		t.Errorf("%q: exit code %d\n%s", args, code, text)
	}
	for line := range strings.Lines(text) {
		if n := utf8.RuneCountInString(line) - 1; n > maxLine {
			t.Errorf("%s %q: a line of %d characters: %s", program, args, n, line)
		}
	}
	return text
}

var (
	title = regexp.MustCompile(`(?m)^\S.*:$`)
	named = regexp.MustCompile(`(?m)^  --([a-z0-9-]+)`)
)

// --help of a daemon shows the most important flags, --help=all every flag, in groups.
func TestHelpOfDaemons(t *testing.T) {
	for _, c := range []struct {
		name   string
		words  []string
		groups int // at least, of all flags
	}{
		{"nsqd", nil, 9}, {"loaddistributor", nil, 8}, {"tbadaptor", nil, 3}, {"admission", nil, 4}, {"gateway", nil, 5},
		{"gateway", []string{"check"}, 2}, {"gateway", []string{"explain"}, 2}, {"gateway", []string{"profile"}, 2}, {"gateway", []string{"monitor"}, 2},
	} {
		program := localtest.Program(t, c.name)
		said := strings.Join(append([]string{c.name}, c.words...), " ")
		first, all := help(t, program, append(c.words, "--help")...), help(t, program, append(c.words, "--help=all")...)
		for _, text := range []string{first, all} {
			if !strings.Contains(text, "\nUsage: "+said+" [flags]") || !strings.Contains(text, "\nExamples:\n  "+said) {
				t.Errorf("%s: no usage or example:\n%s", said, text)
			}
		}
		if n := len(title.FindAllString(all, -1)) - 1; n < c.groups { // less the title Examples
			t.Errorf("%s: %d groups, want %d at least:\n%s", said, n, c.groups, all)
		}
		shown, every := len(named.FindAllString(first, -1)), len(named.FindAllString(all, -1))
		if more := fmt.Sprintf("\n%s --help=all shows all %d flags.\n", said, every); shown > 15 || shown < every && !strings.HasSuffix(first, more) {
			t.Errorf("%s: %d of %d flags first:\n%s", said, shown, every, first)
		}
		for _, flag := range named.FindAllString(first, -1) {
			if strings.Count(all, "\n"+flag+" ")+strings.Count(all, "\n"+flag+"\n") != 1 {
				t.Errorf("%s: %s is not once in --help=all", said, flag)
			}
		}
	}
}

// All invalid values are refused at once, each with a valid example, which the flag then accepts.
func TestEveryFaultHasAnExample(t *testing.T) {
	example := regexp.MustCompile(`^(\S+): (?:--([a-z0-9-]+)).*\(for example (--[a-z0-9-]+=.+)\)$`)
	for _, name := range []string{"nsqd", "loaddistributor", "tbadaptor", "admission", "gateway"} {
		program := localtest.Program(t, name)
		var bad []string
		for _, m := range regexp.MustCompile(`(?m)^  --([a-z0-9-]+) (int|duration|uint|msg/s|bytes|messages|connections|topics|channels|consumers|servers|files|port|weight|times|part)\b`).
			FindAllStringSubmatch(help(t, program, "--help=all"), -1) {
			bad = append(bad, "--"+m[1]+"=nonsense")
		}
		text, code := localtest.Command(t, program, bad...)
		var right []string
		for line := range strings.Lines(text) {
			m := example.FindStringSubmatch(strings.TrimSuffix(line, "\n"))
			if m != nil {
				right = append(right, m[3])
			}
		}
		if code != 2 || len(right) < len(bad) {
			t.Errorf("%s: exit code %d, %d of %d faults with an example:\n%s", name, code, len(right), len(bad), text)
		}
		text, _ = localtest.Command(t, program, append(right, "--no-such-flag")...) // the unknown flag keeps the program from running
		for line := range strings.Lines(text) {
			if strings.Contains(line, "want a") {
				t.Errorf("%s: an example is refused: %s", name, line)
			}
		}
	}
}

// Every fault of a command line is reported, also beside TLS files that cannot be read.
func TestFaultsBesideFaultsOfFiles(t *testing.T) {
	for name, c := range map[string]struct{ args, faults string }{
		"nsqd": {
			"--tls-cert=/none --tls-key=/none --tls-root-ca-file=/none --tls-client-auth-policy=x --http-token-file=/none --control-tls-ca=/none --max-weight=0 --data-path=/none",
			"--tls-cert --tls-root-ca-file --tls-client-auth-policy --http-token-file --control-tls-ca --max-weight --data-path",
		},
		"loaddistributor": {
			"--tls-cert=/none --tls-key=/none --tls-client-ca=/none --token-file=/none --http-address=0.0.0.0 --tcp-address=0.0.0.0 --trace-endpoint=x --fitting=x --console-tls-ca=/none --console-token-file=/none --window=-1s",
			"--tls-cert --tls-client-ca --token-file --http-address --tcp-address --trace-endpoint --fitting --console-tls-ca --console-token-file --window",
		},
		"tbadaptor": {
			"--tls-cert=/none --tls-key=/none --tls-client-ca=/none --http-address=0.0.0.0 --trace-endpoint=x --period=-1s",
			"--tls-cert --tls-client-ca --http-address --trace-endpoint --period",
		},
		"admission": {
			"--tls-cert=/none --tls-key=/none --token-file=/none --http-address=0.0.0.0 --udp-address=0.0.0.0 --mac-key-file= --trace-endpoint=x --max-keys=0 --peer-tls-ca=/none",
			"--tls-cert --token-file --http-address --udp-address --trace-endpoint --max-keys --peer-tls-ca",
		},
		"gateway": {
			"--tls-cert=/none --tls-key=/none --admin-address=0.0.0.0 --policy=/none --profiles=/none --loaddistributor-address=localhost --control-tls-ca=/none --broker-tls-ca=/none --gateways=0",
			"--tls-cert --admin-address --policy --profiles --control-tls-ca --broker-tls-ca --gateways",
		},
	} {
		text, code := localtest.Command(t, localtest.Program(t, name), strings.Fields(c.args)...)
		for flag := range strings.FieldsSeq(c.faults) {
			if code != 2 || !regexp.MustCompile(`(?m)^`+name+`: `+flag+`\b`).MatchString(text) {
				t.Errorf("%s: exit code %d, no fault of %s:\n%s", name, code, flag, text)
			}
		}
	}
}

// The help of every daemon states the default port of each address that may lack a port.
func TestDefaultPortsOfDaemons(t *testing.T) {
	flags := regexp.MustCompile(`(?m)^  --([a-z-]+) host:port\s+((?:.*\n {32})*.*)`)
	port := regexp.MustCompile(`\(default (port|0\.0\.0\.0|127\.0\.0\.1)[ :][0-9]+\)`)
	for _, name := range []string{"nsqd", "loaddistributor", "tbadaptor", "admission", "gateway"} {
		for _, m := range flags.FindAllStringSubmatch(help(t, localtest.Program(t, name), "--help=all"), -1) {
			text := strings.Join(strings.Fields(m[2]), " ")
			// An auth server has no default port. The user chooses the listeners for operators and for MQTT.
			if other := []string{"auth-http-address", "admin-http-address", "mqtt-address", "mqtts-address"}; port.MatchString(text) == slices.Contains(other, m[1]) {
				t.Errorf("%s --%s: %s", name, m[1], text)
			}
		}
	}
}

// Every command of srtm, iotpub and drlsim has a help text.
func TestHelpOfCommands(t *testing.T) {
	commands := regexp.MustCompile(`(?m)^  ([a-z][a-z0-9-]*) +[A-Z]`)
	count := 0
	for _, pkg := range []string{"tools/srtm", "tools/iotpub", "tools/drlsim"} {
		program := localtest.Program(t, pkg)
		var walk func(path ...string)
		walk = func(path ...string) {
			count++
			text := help(t, program, append(path, "--help")...)
			said := strings.Join(append([]string{pkg[strings.Index(pkg, "/")+1:]}, path...), " ")
			below := slices.DeleteFunc(commands.FindAllStringSubmatch(text, -1), func(m []string) bool {
				return m[1] == "help" || strings.HasSuffix(pkg, "/"+m[1]) // the line of its usage
			})
			if !strings.Contains(text, "Usage:\n  "+said) {
				t.Errorf("%s: no usage:\n%s", said, text)
				return
			}
			if len(below) == 0 && !strings.Contains(said, "completion") && said != "srtm help" && !strings.Contains(text, "\nExamples:\n") {
				t.Errorf("%s: no example", said)
			}
			if len(below) == 0 && len(title.FindAllString(text, -1)) < 2 {
				t.Errorf("%s: nothing is in groups:\n%s", said, text)
			}
			for _, sub := range below {
				walk(append(slices.Clone(path), sub[1])...)
			}
		}
		walk()
	}
	if count < 50 {
		t.Errorf("%d commands were found, want at least 50", count)
	}
	text, code := localtest.Command(t, localtest.Program(t, "tools/srtm"), "topic", "crate", "t")
	testkit.Equal(t, fmt.Sprint(code, text), "2srtm: \"crate\": srtm topic has no such command; did you mean srtm topic create?\n")
}
