package security

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// machines are the page's two machines: network namespaces if this process may make them, and
// otherwise loopback addresses, where nothing counts as beyond loopback.
type machines struct {
	t    *testing.T
	home string
	// spaces has the namespaces by machine; nil without namespaces.
	spaces map[string]string
}

// The page's commands work as described, one block after the other.
func TestThePageOfTwoMachines(t *testing.T) {
	for _, program := range []string{"bash", "openssl", "curl"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("the page needs %s: %v", program, err)
		}
	}
	all := localtest.Blocks(t, "security.md")
	m := &machines{t: t, home: t.TempDir()}
	m.separate()
	for _, name := range []string{"A", "B"} {
		testkit.Must(t, os.MkdirAll(filepath.Join(m.home, name, "srtm"), 0o700))
	}
	m.write("scp", "#!/bin/bash\nfor last; do :; done\ncp \"${@:1:$#-1}\" \"$OTHER/${last#*:}\"\n")
	for _, name := range []string{"loaddistributor", "nsqd", "tools/srtm"} {
		program := localtest.Program(t, name)
		testkit.Must(t, os.Symlink(program, filepath.Join(m.home, filepath.Base(program))))
	}
	for i, block := range all {
		first, _, _ := strings.Cut(block.Text, "\n")
		machine := strings.TrimPrefix(first, "# on ")
		if block.Language != "sh" || machine != "A" && machine != "B" {
			t.Fatalf("block %d is %s and begins with %q", i+1, block.Language, first)
		}
		if !m.run(machine, block.Text) {
			logs, _ := filepath.Glob(filepath.Join(m.home, "*", "srtm", "*.log"))
			for _, name := range logs {
				text, _ := os.ReadFile(name)
				t.Logf("%s:\n%s", filepath.Base(name), text)
			}
			t.Fatalf("block %d has failed:\n%s", i+1, block.Text)
		}
	}
}

func (m *machines) write(name, text string) {
	m.t.Helper()
	testkit.Must(m.t, os.WriteFile(filepath.Join(m.home, name), []byte(text), 0o755))
}

// separate makes the namespaces. The namespaces end with the test.
func (m *machines) separate() {
	t := m.t
	ip := func(args ...string) error {
		out, err := exec.Command("ip", args...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, out)
		}
		return nil
	}
	spaces := map[string]string{"A": fmt.Sprintf("srtm-a-%d", os.Getpid()), "B": fmt.Sprintf("srtm-b-%d", os.Getpid())}
	for _, name := range spaces {
		if err := ip("netns", "add", name); err != nil {
			t.Logf("on loopback: %v", err)
			return
		}
		t.Cleanup(func() {
			testkit.NoError(t, ip("netns", "del", name))
		})
	}
	a, b := spaces["A"], spaces["B"]
	steps := [][]string{
		{"-n", a, "link", "add", "near", "type", "veth", "peer", "name", "near", "netns", b},
		{"-n", a, "addr", "add", "10.0.0.1/24", "dev", "near"}, {"-n", b, "addr", "add", "10.0.0.2/24", "dev", "near"},
	}
	for _, name := range spaces {
		steps = append(steps, []string{"-n", name, "link", "set", "near", "up"}, []string{"-n", name, "link", "set", "lo", "up"})
	}
	for _, step := range steps {
		if err := ip(step...); err != nil {
			t.Logf("on loopback: %v", err)
			return
		}
	}
	m.spaces = spaces
}

// run makes bash run a block on a machine, and reports whether every command succeeded. Processes that
// the block leaves running end with the test.
func (m *machines) run(machine, block string) bool {
	m.t.Helper()
	var prefix []string
	if m.spaces != nil {
		prefix = []string{"ip", "netns", "exec", m.spaces[machine]}
	} else {
		block = strings.NewReplacer("10.0.0.1", "127.0.0.2", "10.0.0.2", "127.0.0.3", "127.0.0.1:4153", map[string]string{"A": "127.0.0.2:4153", "B": "127.0.0.3:4153"}[machine]).Replace(block)
	}
	home := filepath.Join(m.home, machine)
	_, ok := localtest.Bash(m.t, prefix, filepath.Join(home, "srtm"),
		[]string{"HOME=" + home, "OTHER=" + filepath.Join(m.home, "B"), "PATH=" + m.home + ":" + os.Getenv("PATH")}, block)
	return ok
}
