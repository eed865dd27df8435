package clients

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
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
			target, home := filepath.Join(s.to, "target"), filepath.Join(s.to, "cargo")
			s.env = append(s.env, "CARGO_HOME="+home)
			if err := s.run("cargo", "build", "--quiet", "--locked", "--jobs=2", "--target-dir", target); err != nil {
				return err
			}
			// the rest has half a gigabyte
			return errors.Join(os.Rename(filepath.Join(target, "debug", "driver"), filepath.Join(s.to, "driver")), os.RemoveAll(target), os.RemoveAll(home))
		},
		command: func(s *site) []string { return []string{filepath.Join(s.to, "driver")} },
	},
}

// site is where a library is installed.
type site struct {
	from string // the driver's folder
	to   string // in the user's cache folder
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

// prepare installs l, unless l was installed from the same files for the same runtime before, or skips t.
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
	s := &site{from: filepath.Join(testkit.Root(t), "tests", "clients", l.folder)}
	if l.always {
		s.to = t.TempDir()
		if err := l.install(s); err != nil {
			t.Fatalf("install %s: %v", l.name, err)
		}
		return s
	}
	caches, err := os.UserCacheDir()
	testkit.Must(t, err)
	files, err := s.fingerprint(l.needs[0])
	testkit.Must(t, err)
	s.to = filepath.Join(caches, "srtm", "clients", l.folder+"-"+files)
	testkit.Must(t, os.MkdirAll(s.to, 0o755))
	// Another test or checkout may install the same.
	stamp, err := os.OpenFile(s.to+stampSuffix, os.O_RDWR|os.O_CREATE, 0o644)
	testkit.Must(t, err)
	defer stamp.Close()
	testkit.Must(t, syscall.Flock(int(stamp.Fd()), syscall.LOCK_EX))
	if text, err := io.ReadAll(stamp); err == nil && len(text) > 0 {
		testkit.Must(t, os.Chtimes(stamp.Name(), time.Time{}, time.Now()))
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
	_, err = stamp.WriteString("by tests/clients\n")
	testkit.Must(t, err)
	removeUnused(t, filepath.Dir(s.to))
	results.installed(l.name, time.Since(begin))
	return s
}

// stampSuffix ends the name of the file beside a folder of an installation. The file is empty until the
// installation is complete, and its time is the last use.
const stampSuffix = ".installed"

// removeUnused removes the installations that no test has used for a month.
func removeUnused(t *testing.T, caches string) {
	t.Helper()
	stamps, err := filepath.Glob(filepath.Join(caches, "*"+stampSuffix))
	testkit.Must(t, err)
	for _, stamp := range stamps {
		if info, err := os.Stat(stamp); err == nil && time.Since(info.ModTime()) > 30*24*time.Hour {
			testkit.Must(t, os.Remove(stamp))
			testkit.Must(t, os.RemoveAll(strings.TrimSuffix(stamp, stampSuffix)))
		}
	}
}

// fingerprint identifies the files of the driver's folder and the version of the runtime.
func (s *site) fingerprint(runtime string) (string, error) {
	sum := sha256.New()
	version, err := exec.Command(runtime, "--version").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s --version: %w: %s", runtime, err, version)
	}
	sum.Write(version)
	err = fs.WalkDir(os.DirFS(s.from), ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := os.ReadFile(filepath.Join(s.from, path))
		if err != nil {
			return err
		}
		fmt.Fprintf(sum, "%s %d\n", path, len(text))
		sum.Write(text)
		return nil
	})
	return hex.EncodeToString(sum.Sum(nil)[:8]), err
}
