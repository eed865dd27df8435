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

// TestTheTutorial runs the commands and programs of the page exactly as printed, in a network namespace,
// where the page's ports are free. Producers publish to a missing topic, most of the producers at a
// broker without the topic. The test skips the programs of a language that is not installed.
func TestTheTutorial(t *testing.T) {
	space := testkit.NewNamespace(t)
	folder := t.TempDir()
	var path []string // folders
	for _, name := range []string{"nsqd", "loaddistributor", "tools/srtm"} {
		path = append(path, filepath.Dir(localtest.Program(t, name)))
	}
	env := []string{"GOWORK=off", "GOFLAGS=-mod=mod", "GOPROXY=off"}
	languages := map[string]string{"go run": "from Go"} // by the beginning of a command: the consumer's output
	t.Run("Python", func(t *testing.T) {
		path = append(path, filepath.Join(prepare(t, "pynsq").to, "bin"))
		languages["python3"] = "from Python"
	})
	t.Run("Node", func(t *testing.T) {
		env = append(env, "NODE_PATH="+filepath.Join(prepare(t, "nsqjs").to, "node_modules"))
		languages["node"] = "from Node"
	})
	path = append(path, filepath.Dir(testkit.Result(exec.LookPath("go")).Must(t)), os.Getenv("PATH"))
	env = append(env, "PATH="+strings.Join(path, ":"))
	goModule(t, folder)

	named := regexp.MustCompile(`^(?:#|//) (\w+\.\w+)\n`)
	printed := ""
	for i, block := range localtest.Blocks(t, "tutorial.md") {
		if block.Language != "sh" {
			name := named.FindStringSubmatch(block.Text)
			if name == nil {
				t.Fatalf("block %d of %s does not begin with the name of its file", i+1, block.Language)
			}
			testkit.Must(t, os.WriteFile(filepath.Join(folder, name[1]), []byte(block.Text), 0o600))
			continue
		}
		commands := ""
		for line := range strings.Lines(block.Text) {
			if installed(languages, line) {
				commands += line
			}
		}
		text, ok := localtest.Bash(t, []string{"ip", "netns", "exec", space.Name}, folder, env, commands)
		if !ok {
			t.Fatalf("block %d has failed:\n%s", i+1, block.Text)
		}
		printed += text
	}
	want := map[string]int{"contract  r 100 msg/s, b 10, SLO 99 % within 50ms\n": 2, "safe to stop": 1, "real": 1}
	for _, text := range languages {
		want[text+"\n"] = 1
	}
	for text, count := range want {
		if got := strings.Count(printed, text); got != count {
			t.Errorf("%q is printed %d times, want %d", text, got, count)
		}
	}
	if t.Failed() {
		t.Log(printed)
	}
}

func prepare(t *testing.T, name string) *site {
	t.Helper()
	i := slices.IndexFunc(libraries, func(l library) bool { return l.name == name })
	return libraries[i].prepare(t)
}

// installed reports whether a line of a block can run: the line begins with no language, or with an
// installed language.
func installed(languages map[string]string, line string) bool {
	for _, program := range []string{"python3", "node", "go run"} {
		if strings.HasPrefix(line, program+" ") {
			return languages[program] != ""
		}
	}
	return true
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
