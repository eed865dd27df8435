package terminal

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// session is a terminal in which commands run one after the other; text is the terminal's output.
type session struct {
	t     *testing.T
	dir   string
	named []string // pairs of a text that differs from run to run, and its name
	text  strings.Builder
}

// run types a command line with the names of addresses in place of the addresses.
func (s *session) run(line string) {
	s.t.Helper()
	fmt.Fprintf(&s.text, "$ %s\n", line)
	var back []string
	for i := 0; i < len(s.named); i += 2 {
		back = append(back, s.named[i+1], s.named[i])
	}
	cmd := exec.CommandContext(s.t.Context(), "sh", "-c", strings.NewReplacer(back...).Replace(line))
	cmd.Dir = s.dir
	cmd.Env = append(cmd.Environ(), "PATH="+s.dir+":"+"/usr/bin:/bin", "SRTM_LOADDISTRIBUTOR_ADDRESS=")
	out, err := cmd.CombinedOutput()
	if text := s.mask(string(out)); text != "" {
		s.text.WriteString(strings.TrimSuffix(text, "\n") + "\n")
	}
	if err != nil {
		fmt.Fprintf(&s.text, "[%v]\n", err)
	}
}

// masks are the other parts that differ from run to run.
var masks = []struct {
	of *regexp.Regexp
	as string
}{
	{regexp.MustCompile(`"id":"[0-9a-f]{16}"`), `"id":"ID"`},
	{regexp.MustCompile(`"timestamp":[0-9]+,"attempts":[0-9]+`), `"timestamp":NS,"attempts":N`}, // the message may have been in flight before
	{regexp.MustCompile(`20[0-9]{2}-[0-9]{2}-[0-9]{2}T[0-9:.]+Z`), "TIME"},
	{regexp.MustCompile(`epoch [0-9]+`), "epoch N"},
	{regexp.MustCompile(`SRTM 0\.[^\n]*`), "SRTM VERSION"},
	{regexp.MustCompile(`127\.0\.0\.1:[0-9]+`), "ADDRESS"},
	{regexp.MustCompile(` {2,}`), "  "}, // column widths depend on the masked texts
}

func (s *session) mask(text string) string {
	text = strings.NewReplacer(s.named...).Replace(text)
	for _, m := range masks {
		text = m.of.ReplaceAllString(text, m.as)
	}
	return text
}

// name gives an address a name in the text.
func (s *session) name(address, name string) { s.named = append(s.named, address, name) }

func newSession(t *testing.T) *session {
	return &session{t: t, dir: localtest.Folder(t, "tools/srtm", "nsqd", "loaddistributor")}
}

func (s *session) golden(name string) {
	s.t.Helper()
	testkit.Golden(s.t, filepath.Join("testdata", name), []byte(s.text.String()))
}

// A single broker: publish, read, limit, and typical first mistakes.
func TestSessionOfOneBroker(t *testing.T) {
	s := newSession(t)
	n := localtest.NSQD(t, "")
	s.name(n.TCP, "BROKER:4150")
	s.name(n.HTTP, "BROKER:4151")
	s.name(testkit.Address(t), "BROKER:9")
	s.run("srtm pub orders --nsqd-tcp-address BROKER:4150 --message hello --count 3")
	s.run("srtm tail orders --nsqd-tcp-address BROKER:4150 --channel billing --count 2")
	s.run("srtm tail orders --nsqd-tcp-address BROKER:4150 --channel billing --count 1 --output json | sed 's/\"broker\":\"[^\"]*\"/\"broker\":\"B\"/'")
	s.run("curl -s -X POST 'http://BROKER:4151/topic/limit?topic=orders&rate=100&burst=20'")
	s.run("curl -s 'http://BROKER:4151/stats?topic=orders&format=text' | grep -c orders")
	s.run("srtm channel pause orders billing --nsqd-http-address BROKER:4151")
	s.run("srtm channel unpause orders billing --nsqd-http-address BROKER:4151")
	s.run("curl -s -X POST 'http://BROKER:4151/topic/pause?topic=oders'")
	s.run("curl -s -X POST -H 'Content-Encoding: gzip' -d x 'http://BROKER:4151/pub?topic=orders'")
	s.run("srtm pub orders --nsqd-tcp-address BROKER:9 --id p1 --message hello --timeout 5s")
	s.run("srtm pub orders --nsqd-tcp-address BROKER:4151 --id p1 --message hello --timeout 5s")
	s.run("srtm tail orders --nsqd-tcp-address BROKER:4151 --count 1")
	s.run("srtm topic list --loaddistributor-address BROKER:4151 --timeout 5s")
	s.run("srtm topic list --loaddistributor-address BROKER:9 --timeout 5s")
	s.run("nsqd --tcp-adress=:1 --mcap=many --msg-timeout=60000 --mem-queue-size=-1")
	s.golden("one-broker.txt")
}

// A cluster: create, describe, channels, move, drain, doctor.
func TestSessionOfACluster(t *testing.T) {
	s := newSession(t)
	c := localtest.Start(t, 0, []string{"--fitting=off"})
	s.name(c.RPC, "LD:4170")
	s.name(c.Web, "LD:4161")
	s.run("srtm topic create sensors --loaddistributor-address LD:4170")
	for range 2 {
		b := c.Join(t, "--mcap=5000")
		s.name(b.TCP, fmt.Sprintf("B%d:4150", len(c.Brokers)))
		s.name(b.HTTP, fmt.Sprintf("B%d:4151", len(c.Brokers)))
	}
	at := " --loaddistributor-address LD:4170"
	s.run("srtm topic create sensors --rate 0 --burst 0 --slo-latency 50us --group north:10:100" + at)
	s.run("srtm topic create sensors --rate 2000 --burst 100 --group north:10:100 --group south:10:100 --channel billing" + at)
	s.run("srtm topic create sensors --rate 20000 --burst 100 --group north:10:100" + at)
	s.run("srtm topic create big --rate 20000 --burst 100" + at)
	s.run("srtm channel create sensors alerts" + at)
	s.run("srtm channel pause sensors alerts" + at)
	s.run("srtm channel list sensors" + at)
	s.run("srtm channel unpause sensors alerts" + at)
	s.run("srtm channel empty sensors alerts" + at)
	s.run("srtm channel delete sensors alerts" + at)
	s.run("srtm channel pause sensors none" + at)
	s.run("srtm pub sensors --message '{\"t\":21.5}' --count 3" + at)
	s.run("srtm topic move sensors --to b2 --group north" + at)
	s.run("srtm topic move sensors --to b9 --all" + at)
	s.run("srtm topic move sensors" + at)
	s.run("srtm broker list" + at)
	s.run("srtm topic describe sensors" + at + " | head -n 3")
	s.run("srtm topic lst" + at)
	s.run("srtm topic describe sensor" + at)
	s.run("curl -s 'http://LD:4161/publisher?topic=sensor&id=x'")
	s.run("curl -s 'http://LD:4161/publisher?topic=sensors'")
	s.run("srtm doctor --output json" + at + " | grep -c '\"check\": \"loaddistributor\\|\"check\": \"broker'")
	s.run("srtm topic list --loaddistributor-address LD:4161 --timeout 5s")
	s.run("srtm topic delete sensors" + at)
	s.run("srtm broker drain b1 --wait --timeout 60s" + at + " 2>/dev/null")
	s.golden("cluster.txt")
}
