package pages

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

func TestMain(m *testing.M) { localtest.Main(m) }

// run runs the commands of a page in a folder and a network of their own, where the page's ports are
// free, and returns the output of each block.
func run(t *testing.T, page string, env ...string) (printed []string) {
	t.Helper()
	for _, program := range []string{"bash", "curl"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("the page needs %s: %v", program, err)
		}
	}
	space, folder := testkit.NewNamespace(t), t.TempDir()
	for i, block := range localtest.Blocks(t, page) {
		if block.Language != "sh" {
			continue
		}
		text, ok := localtest.Bash(t, []string{"ip", "netns", "exec", space.Name}, folder, env, block.Text)
		if !ok {
			t.Fatalf("block %d has failed:\n%s", i+1, block.Text)
		}
		printed = append(printed, text)
	}
	return printed
}

// folder makes a folder of links to programs.
func folder(t *testing.T, paths ...string) string {
	t.Helper()
	to := t.TempDir()
	for _, path := range paths {
		testkit.Must(t, os.Symlink(path, filepath.Join(to, filepath.Base(path))))
	}
	return to
}

// shell runs commands as a user of a page would, in the page's folder and network.
type shell struct {
	t      *testing.T
	space  testkit.Namespace
	folder string
	env    []string
}

func (s shell) run(commands string) string {
	s.t.Helper()
	text, ok := localtest.Bash(s.t, []string{"ip", "netns", "exec", s.space.Name}, s.folder, s.env, commands)
	if !ok {
		s.t.Fatalf("these commands have failed:\n%s", commands)
	}
	return text
}

// commands returns the blocks of commands of a page.
func commands(t *testing.T, page string, count int) (blocks []string) {
	t.Helper()
	for _, block := range localtest.Blocks(t, page) {
		if block.Language == "sh" {
			blocks = append(blocks, block.Text)
		}
	}
	testkit.MustEqual(t, len(blocks), count, "blocks of commands of %s", page)
	return blocks
}

// beside runs commands in the background, as in a terminal of their own.
func beside(commands, log string) string { return "{ " + commands + "\n} > " + log + " 2>&1 &\n" }

// The pages for the first hour with a cluster: the first cluster, capacity without calibration (which
// depends on the machine), upgrade and backup.
func TestThePagesOfAFirstCluster(t *testing.T) {
	bin := ours(t, "nsqd", "loaddistributor", "tools/srtm")
	s := shell{t, testkit.NewNamespace(t), t.TempDir(), []string{"PATH=" + bin + ":" + os.Getenv("PATH")}}
	testkit.Must(t, os.Symlink(bin, filepath.Join(s.folder, "bin")))
	const connected = "until srtm broker list | grep -q \" connected \"; do sleep 0.1; done\n"

	page := commands(t, "first-cluster.md", 6)
	s.run(beside(page[0], "control.log") + beside(page[1], "b1.log") + connected)
	want(t, []string{s.run(page[2])}, "b1 ", "preparing", "topic     sensors", "r 11000 msg/s, b 30")
	// The terminal that prints every message of topic sensors, the publisher, and a further channel.
	printed := s.run(beside(page[3], "tail.log") + beside("while :; do "+strings.TrimSpace(page[4])+"; done", "pub.log") + page[5] + `
		until grep -q '^100$' tail.log; do sleep 0.1; done
		kill $(jobs -p)`)
	want(t, []string{printed}, `"broker":"127.0.0.1:4150"`, `"body":"`)

	page = commands(t, "capacity.md", 3)
	capacity, without := page[0], []string(nil)
	for line := range strings.Lines(capacity) {
		if !strings.Contains(line, "broker calibrate") {
			without = append(without, line)
		}
	}
	want(t, []string{s.run(strings.Join(without, ""))}, "mcap 18000", "mcap 20000")
	want(t, []string{s.run(page[1])}, "topic sensors, policy srtm, k = 2", "b2", "north:500 south:500")

	// A drain needs another broker, and consumers that finish the messages: tests/failover drains.
	page = commands(t, "upgrade.md", 3)
	want(t, []string{s.run(page[0])}, "VERSION", "b1 ", "SRTM")
	s.run(regexp.MustCompile("(?m)^.* --wait .*$").ReplaceAllString(page[1], ""))
	want(t, []string{s.run(strings.ReplaceAll(page[2], "srtm doctor", "srtm doctor || true"))}, "b1 ", "sensors", "CHECK")

	page = commands(t, "backup.md", 2)
	s.run(page[0])
	want(t, []string{s.run(page[1])}, "left out: restore topic sensors: topic exists", "imported 0 topics")
}

func ours(t *testing.T, names ...string) string {
	t.Helper()
	var paths []string
	for _, name := range names {
		paths = append(paths, localtest.Program(t, name))
	}
	return folder(t, paths...)
}

// want checks that the output contains these texts in this order.
func want(t *testing.T, printed []string, texts ...string) {
	t.Helper()
	all := strings.Join(printed, "")
	rest := all
	for _, text := range texts {
		_, after, found := strings.Cut(rest, text)
		if !found {
			t.Fatalf("%q is not printed in its place:\n%s", text, all)
		}
		rest = after
	}
}

// The first message of a device.
func TestThePageOfMQTT(t *testing.T) {
	if _, err := exec.LookPath("mosquitto_pub"); err != nil {
		t.Skipf("the page needs mosquitto_pub: %v", err)
	}
	bin := folder(t, localtest.Program(t, "nsqd"), testkit.Upstream(t, "nsq_tail"))
	want(t, run(t, "mqtt.md", "PATH="+bin+":"+os.Getenv("PATH")), `{"level":7}`)
}

func TestThePageFromNSQ(t *testing.T) {
	var theirs []string
	for _, name := range []string{"nsqd", "nsqadmin", "to_nsq", "nsq_tail"} {
		theirs = append(theirs, testkit.Upstream(t, name))
	}
	printed := run(t, "from-nsq.md", "NSQ="+folder(t, theirs...), "SRTM="+ours(t, "nsqd", "loaddistributor", "tools/srtm"))
	want(t, printed,
		"depth: 100", "nsqd.dat.imported", // our nsqd has the messages
		"active", "110", // the cluster has them
		`"orders"`,   // nsqadmin shows the topic
		"depth: 100", // NSQ's nsqd has the messages again
	)
}

func TestThePageOfGRPC(t *testing.T) {
	grpcurl := filepath.Dir(testkit.Tool(t, "github.com/fullstorydev/grpcurl/cmd/grpcurl"))
	path := strings.Join([]string{ours(t, "nsqd", "loaddistributor", "tools/srtm", "admission"), grpcurl, os.Getenv("PATH")}, ":")
	want(t, run(t, "grpc.md", "PATH="+path),
		"srtm.v1.AdminService", "rpc CreateTopic", "string name = 1", "SERVING", `"b1"`, // look around
		"ACTIVE", `"burst": "20"`, // create and change
		"127.0.0.1:4150", `"orders"`, // brokers and shares
		"NotFound", "exit code", `"admit": true`,
	)
}
