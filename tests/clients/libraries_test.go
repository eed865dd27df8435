package clients

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

// library is one client library with its driver.
type library struct {
	name    string
	folder  string            // of the driver
	needs   []string          // programs; without one of them it is skipped
	always  bool              // with every go test
	install func(*site) error // into site.to
	command func(*site) []string
	lacks   func(*site) (map[string]string, error) // scenarios that the library has no means for, and why
	backoff bool                                   // it turns its RDY to 0 after failures
}

var libraries = []library{
	{
		name: "go-nsq", folder: "gonsq", needs: []string{"go"}, always: true, backoff: true,
		install: func(s *site) error { return s.run("go", "build", "-o", filepath.Join(s.to, "driver"), ".") },
		command: func(s *site) []string { return []string{filepath.Join(s.to, "driver")} },
	},
	{
		name: "pynsq", folder: "python", needs: []string{"python3"}, backoff: true,
		install: func(s *site) error {
			if err := s.run("python3", "-m", "venv", "--clear", s.to); err != nil {
				return err
			}
			return s.run(filepath.Join(s.to, "bin", "pip"), "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--requirement", "requirements.txt")
		},
		command: func(s *site) []string {
			return []string{filepath.Join(s.to, "bin", "python"), filepath.Join(s.from, "driver.py")}
		},
		lacks: func(s *site) (map[string]string, error) {
			version, err := exec.Command(filepath.Join(s.to, "bin", "python"), "-c", "import tornado; print(tornado.version)").Output()
			if err != nil || strings.HasPrefix(string(version), "6.0.") {
				return nil, err
			}
			const why = "its compression needs a tornado before 6.1, and that a Python before 3.12"
			return map[string]string{"snappy": why, "deflate": why, "TLS, snappy": why}, nil
		},
	},
	{
		name: "nsqjs", folder: "node", needs: []string{"node", "npm"}, backoff: true,
		install: func(s *site) error {
			// npm installs beside the lock file, so that goes there, too.
			for _, name := range []string{"package.json", "package-lock.json", "driver.js"} {
				if err := s.copy(name); err != nil {
					return err
				}
			}
			return s.run("npm", "ci", "--prefix", s.to, "--no-audit", "--no-fund", "--loglevel=error")
		},
		command: func(s *site) []string { return []string{"node", filepath.Join(s.to, "driver.js")} },
	},
	{
		name: "nsq-j", folder: "java", needs: []string{"java", "javac", "mvn"}, backoff: true,
		install: func(s *site) error {
			return s.run("mvn", "--quiet", "--batch-mode", "-Dmaven.repo.local="+filepath.Join(s.to, "m2"), "-Dclients.build="+s.to, "compile")
		},
		command: func(s *site) []string {
			jars := filepath.Join(s.to, "lib", "*")
			return []string{"java", "-XX:TieredStopAtLevel=1", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
				"-cp", filepath.Join(s.to, "classes") + string(filepath.ListSeparator) + jars, "Driver"}
		},
	},
	{
		name: "tokio-nsq", folder: "rust", needs: []string{"cargo", "cc"},
		install: func(s *site) error {
			s.env = append(s.env, "CARGO_HOME="+filepath.Join(s.to, "cargo"))
			return s.run("cargo", "build", "--quiet", "--locked", "--jobs=2", "--target-dir", filepath.Join(s.to, "target"))
		},
		command: func(s *site) []string { return []string{filepath.Join(s.to, "target", "debug", "driver")} },
	},
}

// site is where a library is installed.
type site struct {
	from string // the driver's folder
	to   string // build/clients/<library>
	env  []string
}

// run runs an installer's command in the driver's folder.
func (s *site) run(name string, args ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Env = s.from, append(os.Environ(), s.env...)
	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, output)
	}
	return nil
}

func (s *site) copy(name string) error {
	text, err := os.ReadFile(filepath.Join(s.from, name))
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(s.to, name), text, 0o644)
}

// prepare installs l unless that was done from the same files before, or skips t.
func (l library) prepare(t *testing.T) *site {
	t.Helper()
	if !l.always && os.Getenv(envClients) == "" {
		t.Skipf("%s is installed and tested by `make test-clients` (%s=1)", l.name, envClients)
	}
	for _, program := range l.needs {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("%s is not tested: no %s here", l.name, program)
		}
	}
	root := testkit.Root(t)
	s := &site{from: filepath.Join(root, "tests", "clients", l.folder), to: filepath.Join(root, "build", "clients", l.name)}
	if l.always {
		s.to = t.TempDir()
	}
	if err := os.MkdirAll(s.to, 0o755); err != nil {
		t.Fatal(err)
	}
	want, err := s.fingerprint()
	if err != nil {
		t.Fatal(err)
	}
	stamp := filepath.Join(s.to, "installed")
	if have, err := os.ReadFile(stamp); err == nil && bytes.Equal(have, want) {
		return s
	}
	begin := time.Now()
	if err := l.install(s); err != nil {
		t.Fatalf("install %s: %v", l.name, err)
	}
	if err := os.WriteFile(stamp, want, 0o644); err != nil {
		t.Fatal(err)
	}
	t.Logf("%s installed in %v", l.name, time.Since(begin).Round(time.Second))
	return s
}

// fingerprint sums up the driver's folder.
func (s *site) fingerprint() ([]byte, error) {
	sum := sha256.New()
	err := filepath.WalkDir(s.from, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		fmt.Fprintf(sum, "%s %d\n", path, len(text))
		sum.Write(text)
		return nil
	})
	return []byte(hex.EncodeToString(sum.Sum(nil)) + "\n"), err
}
