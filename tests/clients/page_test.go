package clients

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// The page's commands and programs run exactly as printed, in their own network, where the page's
// ports are free. Producers publish to a topic that does not exist yet, most of them at a broker
// without the topic.
func TestThePageFromNSQ(t *testing.T) {
	space := testkit.NewNamespace(t)
	folder := t.TempDir()
	var programs []string // folders
	for _, name := range []string{"nsqd", "loaddistributor", "tools/srtm"} {
		programs = append(programs, filepath.Dir(localtest.Program(t, name)))
	}
	byName := func(name string) *site {
		i := slices.IndexFunc(libraries, func(l library) bool { return l.name == name })
		return libraries[i].prepare(t)
	}
	python, node := byName("pynsq"), byName("nsqjs")
	programs = append(programs, filepath.Join(python.to, "bin"), filepath.Dir(testkit.Result(exec.LookPath("go")).Must(t)))
	env := []string{
		"PATH=" + strings.Join(append(programs, os.Getenv("PATH")), ":"), "NODE_PATH=" + filepath.Join(node.to, "node_modules"),
		"GOWORK=off", "GOFLAGS=-mod=mod", "GOPROXY=off",
	}
	goModule(t, folder)
	named := regexp.MustCompile(`^(?:#|//) (\w+\.\w+)\n`)
	printed := ""
	for i, block := range localtest.Blocks(t, "from-nsq.md") {
		if block.Language != "sh" {
			name := named.FindStringSubmatch(block.Text)
			if name == nil {
				t.Fatalf("block %d of %s does not begin with the name of its file", i+1, block.Language)
			}
			testkit.Must(t, os.WriteFile(filepath.Join(folder, name[1]), []byte(block.Text), 0o600))
			continue
		}
		text, ok := localtest.Bash(t, []string{"ip", "netns", "exec", space.Name}, folder, env, block.Text)
		if !ok {
			t.Fatalf("block %d has failed:\n%s", i+1, block.Text)
		}
		printed += text
	}
	for text, count := range map[string]int{
		"\nfrom Python\n": 1, "\nfrom Node\n": 1, "\nfrom Go\n": 1, "\ncontract  r 100 msg/s, b 10, SLO 99 % within 50ms\n": 2, "safe to stop": 1, "\nfollows": 0,
	} {
		if got := strings.Count(printed, strings.TrimPrefix(text, "\n")); got != count {
			t.Errorf("%q is printed %d times, want %d", text, got, count)
		}
	}
	if t.Failed() {
		t.Log(printed)
	}
}

// goModule makes the folder a module that requires the imports of the page's Go programs, in the
// versions of these tests.
func goModule(t *testing.T, folder string) {
	t.Helper()
	of := filepath.Join(testkit.Root(t), "tests")
	text := string(testkit.Result(os.ReadFile(filepath.Join(of, "go.mod"))).Must(t))
	module := "module example\n"
	for _, line := range regexp.MustCompile(`(?m)^go .*$|^\t(?:github.com/nsqio/go-nsq|github.com/golang/snappy) \S+`).FindAllString(text, -1) {
		module += strings.Replace(line, "\t", "require ", 1) + "\n"
	}
	testkit.Must(t, os.WriteFile(filepath.Join(folder, "go.mod"), []byte(module), 0o600))
	testkit.Must(t, os.WriteFile(filepath.Join(folder, "go.sum"), testkit.Result(os.ReadFile(filepath.Join(of, "go.sum"))).Must(t), 0o600))
}
