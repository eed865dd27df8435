package pages

import (
	"os"
	"os/exec"
	"path/filepath"
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
