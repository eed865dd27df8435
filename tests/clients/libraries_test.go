package clients

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

// library is a client library with its driver.
type library struct {
	name    string
	folder  string            // of the driver
	needs   []string          // required programs; without one of them the library is skipped
	runtime []string          // a command that fails if a part of the runtime is missing
	always  bool              // with every go test
	install func(*site) error // into site.to
	command func(*site) []string
	lacks   func(*site) (map[string]string, error) // scenarios that the library cannot run, and why
	backoff bool                                   // the library sets its RDY to 0 after failures
}

var libraries = []library{
	{
		name: "go-nsq", folder: "gonsq", needs: []string{"go"}, always: true, backoff: true,
		install: func(s *site) error { return s.run("go", "build", "-o", filepath.Join(s.to, "driver"), ".") },
		command: func(s *site) []string { return []string{filepath.Join(s.to, "driver")} },
	},
	{
		name: "pynsq", folder: "python", needs: []string{"python3"}, runtime: []string{"python3", "-c", "import ensurepip, venv"}, backoff: true,
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
			// npm installs beside the lock file, so the lock file is copied, too.
			for _, name := range []string{"package.json", "package-lock.json", "driver.js"} {
				if err := s.copy(name); err != nil {
					return err
				}
			}
			return s.run("npm", "ci", "--prefix", s.to, "--prefer-offline", "--no-audit", "--no-fund", "--loglevel=error")
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
		return installError{fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, output), offline(string(output))}
	}
	return nil
}

// installError is an installer's failure.
type installError struct {
	error
	offline bool // the installer could not reach its registry
}

// unreachable lists the messages of installers that reach no registry: pip, npm, Maven, cargo, each
// run without a network to make this list.
var unreachable = []string{
	"failed to establish a new connection", "eai_again", "enotfound", "enetunreach", "etimedout", "econnrefused",
	"unknown host", "name resolution", "could not resolve host", "network is unreachable", "connection refused", "couldn't connect to server",
}

// offline reports whether an installer failed for want of a network.
func offline(output string) bool {
	output = strings.ToLower(output)
	return slices.ContainsFunc(unreachable, func(sign string) bool { return strings.Contains(output, sign) })
}

func (s *site) copy(name string) error {
	text, err := os.ReadFile(filepath.Join(s.from, name))
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(s.to, name), text, 0o644)
}

// prepare installs l, unless l was installed from the same files before, or skips t.
func (l library) prepare(t *testing.T) *site {
	t.Helper()
	if !l.always && os.Getenv(envClients) == "" {
		results.skip(t, l.name, "", "installed and tested by `make test`, or "+envClients+"=1")
	}
	for _, program := range l.needs {
		if _, err := exec.LookPath(program); err != nil {
			results.skip(t, l.name, "", "no "+program+" here")
		}
	}
	if l.runtime != nil {
		if output, err := exec.Command(l.runtime[0], l.runtime[1:]...).CombinedOutput(); err != nil {
			results.skip(t, l.name, "", fmt.Sprintf("%s: %v: %.200s", strings.Join(l.runtime, " "), err, output))
		}
	}
	root := testkit.Root(t)
	s := &site{from: filepath.Join(root, "tests", "clients", l.folder), to: filepath.Join(root, "build", "clients", l.name)}
	if l.always {
		s.to = t.TempDir()
	}
	testkit.Must(t, os.MkdirAll(s.to, 0o755))
	want, err := s.fingerprint()
	testkit.Must(t, err)
	stamp := filepath.Join(s.to, "installed")
	if have, err := os.ReadFile(stamp); err == nil && bytes.Equal(have, want) {
		return s
	}
	begin := time.Now()
	err = l.install(s)
	if failure, ok := errors.AsType[installError](err); ok && failure.offline {
		t.Log(err)
		results.skip(t, l.name, "", "not installed yet, and its package registry cannot be reached")
	}
	if err != nil {
		t.Fatalf("install %s: %v", l.name, err)
	}
	testkit.Must(t, os.WriteFile(stamp, want, 0o644))
	results.installed(l.name, time.Since(begin))
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
