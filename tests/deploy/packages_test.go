package deploy

import (
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

func TestMain(m *testing.M) { localtest.Main(m) }

var (
	top   = filepath.Join("..", "..")
	units = []string{"admission", "gateway", "loaddistributor", "nsqd", "tbadaptor"}
)

// command runs a program, which must succeed, and returns its output.
func command(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %q: %v\n%s", name, args, err, out)
	}
	return string(out)
}

func needs(t *testing.T, programs ...string) {
	t.Helper()
	for _, p := range programs {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("there is no %s here", p)
		}
	}
}

// install installs Debian packages if one of the programs is missing. It skips the test without apt-get,
// root or network. Any other failure of apt-get fails the test.
func install(t *testing.T, programs, packages []string) {
	t.Helper()
	if !slices.ContainsFunc(programs, func(p string) bool { _, err := exec.LookPath(p); return err != nil }) {
		return
	}
	if os.Geteuid() != 0 {
		needs(t, programs...)
	}
	needs(t, "apt-get")
	out, err := exec.Command("apt-get", append([]string{"install", "-qq", "-y", "--no-install-recommends"}, packages...)...).CombinedOutput()
	if err != nil {
		skipOffline(t, string(out))
		t.Fatalf("apt-get cannot install %q (is the list of packages older than the mirror? apt-get update): %v\n%s", packages, err, tail(string(out), 1000))
	}
	for _, p := range programs {
		if _, err := exec.LookPath(p); err != nil {
			t.Fatalf("%q are installed, and there is no %s", packages, p)
		}
	}
}

// skipOffline skips the test if the output of apt-get or debootstrap says that no mirror can be reached.
func skipOffline(t *testing.T, out string) {
	t.Helper()
	for _, sign := range []string{"Could not resolve", "Temporary failure resolving", "Could not connect", "Unable to connect", "Network is unreachable", "Connection timed out", "unable to resolve host address"} {
		if strings.Contains(out, sign) {
			t.Skipf("no mirror of Debian can be reached: %s", tail(out, 500))
		}
	}
}

// tail returns the end of a text.
func tail(text string, size int) string { return text[max(0, len(text)-size):] }

func read(t *testing.T, path string) string {
	t.Helper()
	text := testkit.Result(os.ReadFile(path)).Must(t)
	return string(text)
}

func write(t *testing.T, path, text string) {
	t.Helper()
	testkit.Must(t, os.MkdirAll(filepath.Dir(path), 0o755))
	testkit.Must(t, os.WriteFile(path, []byte(text), 0o644))
}

// setting returns the value of a unit's line; the last line with the name wins.
func setting(unit, name string) (value string) {
	for line := range strings.Lines(unit) {
		if after, is := strings.CutPrefix(line, name+"="); is {
			value = strings.TrimSpace(after)
		}
	}
	return value
}

func TestUnits(t *testing.T) {
	for _, name := range units {
		unit := read(t, filepath.Join(top, "deploy", "systemd", "srtm-"+name+".service"))
		want := ""
		if name == "nsqd" {
			want = "CAP_BPF CAP_PERFMON"
		}
		if got := setting(unit, "CapabilityBoundingSet"); got != want || setting(unit, "AmbientCapabilities") != want {
			t.Errorf("%s has the capabilities %q, want %q", name, got, want)
		}
		for _, is := range []string{"User=srtm", "NoNewPrivileges=yes", "ProtectSystem=strict", "Restart=on-failure"} {
			if !strings.Contains(unit, "\n"+is+"\n") {
				t.Errorf("%s: no %s", name, is)
			}
		}
	}
	needs(t, "systemd-analyze")
	root := t.TempDir()
	args := []string{"verify", "--root=" + root, "--man=no", "--generators=no"}
	for _, name := range units {
		unit := read(t, filepath.Join(top, "deploy", "systemd", "srtm-"+name+".service"))
		write(t, filepath.Join(root, "usr/lib/systemd/system/srtm-"+name+".service"), unit)
		for _, command := range []string{"ExecStart", "ExecReload"} {
			program := filepath.Join(root, strings.Fields(setting(unit, command))[0])
			write(t, program, "")
			testkit.Must(t, os.Chmod(program, 0o755))
		}
		args = append(args, "srtm-"+name+".service")
	}
	for _, target := range []string{"sysinit", "basic", "multi-user", "network-online", "shutdown"} {
		write(t, filepath.Join(root, "usr/lib/systemd/system", target+".target"), "[Unit]\nDescription=it\n")
	}
	testkit.Equal(t, command(t, "systemd-analyze", args...), "", "systemd-analyze verify says")
	// 0 is the tightest exposure level, 10 the loosest.
	command(t, "systemd-analyze", append([]string{"security", "--offline=true", "--threshold=30", "--no-pager", "--root=" + root}, args[4:]...)...)
}

// prefix is a clean root folder for packages.
type prefix struct {
	t    *testing.T
	root string
}

func newPrefix(t *testing.T) *prefix {
	p := &prefix{t, t.TempDir()}
	testkit.Must(t, os.Chmod(p.root, 0o755))
	for _, dir := range []string{"info", "updates", "triggers"} {
		testkit.Must(t, os.MkdirAll(p.at("var/lib/dpkg", dir), 0o755))
	}
	write(t, p.at("var/lib/dpkg/status"), "")
	write(t, p.at("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n")
	write(t, p.at("etc/group"), "root:x:0:\n")
	return p
}

func (p *prefix) at(path ...string) string {
	return filepath.Join(append([]string{p.root}, path...)...)
}

func (p *prefix) dpkg(args ...string) string {
	p.t.Helper()
	return command(p.t, "dpkg", append([]string{"--root=" + p.root, "--force-script-chrootless", "--force-confold", "--log=/dev/null"}, args...)...)
}

// run runs a daemon by its unit's command, in the prefix as its root folder and as its unit's user, at
// separate addresses.
func (p *prefix) run(name, web string, flags ...string) *local.Process {
	p.t.Helper()
	unit := read(p.t, p.at("usr/lib/systemd/system/srtm-"+name+".service"))
	exec := strings.Fields(setting(unit, "ExecStart"))
	args := append([]string{"--userspec=" + p.user(), p.root}, append(exec, flags...)...)
	d, err := local.Run("chroot", p.t.TempDir(), args, local.Answers("http://"+web))
	return localtest.Watch(p.t, d, err)
}

// user returns the uid:gid of the user that the package has created.
func (p *prefix) user() string {
	for line := range strings.Lines(read(p.t, p.at("etc/passwd"))) {
		if f := strings.Split(line, ":"); f[0] == "srtm" {
			return f[2] + ":" + f[3]
		}
	}
	p.t.Fatal("the package has made no user srtm")
	return ""
}

func (p *prefix) nsqd() (at string, d *local.Process) {
	ports := localtest.Ports(p.t, 2)
	return ports[1], p.run("nsqd", ports[1]+"/ping", "--tcp-address="+ports[0], "--http-address="+ports[1])
}

// has fails unless the channel has exactly these bodies.
func has(t *testing.T, nsqd, topic, channel string, count int, body string) {
	t.Helper()
	text, code, err := localtest.Ask(http.MethodGet, fmt.Sprintf("http://%s/channel/peek?topic=%s&channel=%s&count=100", nsqd, topic, channel), "")
	if err != nil || code != http.StatusOK || strings.Count(text, `"body"`) != count || !strings.Contains(text, body) {
		t.Errorf("%s/%s: %d %v %s", topic, channel, code, err, text)
	}
}

func ask(t *testing.T, nsqd, path, body string) {
	t.Helper()
	localtest.MustAsk(t, http.MethodPost, "http://"+nsqd+path, body)
}

// later returns the package as its next version, with another default configuration.
func later(t *testing.T, deb string) string {
	dir := t.TempDir()
	command(t, "dpkg-deb", "-R", deb, dir)
	control := filepath.Join(dir, "DEBIAN", "control")
	lines := slices.Collect(strings.Lines(read(t, control)))
	for i, line := range lines {
		if strings.HasPrefix(line, "Version: ") {
			lines[i] = "Version: 99.0.0\n"
		}
	}
	write(t, control, strings.Join(lines, ""))
	conf := filepath.Join(dir, "etc/srtm/nsqd.toml")
	write(t, conf, read(t, conf)+"\n# a comment of the next release\n")
	to := filepath.Join(t.TempDir(), "later.deb")
	command(t, "dpkg-deb", "-Znone", "-b", dir, to)
	return to
}

// The packages from `make packages` are installed in a clean prefix, started by their units' commands,
// upgraded, and removed. Run by `make test-packages`.
func TestPackages(t *testing.T) {
	folder := os.Getenv("SRTM_PACKAGES")
	if folder == "" {
		t.Skip("SRTM_PACKAGES names no folder with packages: make test-packages")
	}
	debs, _ := filepath.Glob(filepath.Join(folder, "*_"+runtime.GOARCH+".deb"))
	rpms, _ := filepath.Glob(filepath.Join(folder, "*.rpm"))
	if len(debs) != 1 || len(rpms) != 1 {
		t.Fatalf("%s has %q and %q, want one of each", folder, debs, rpms)
	}
	t.Run("rpm", func(t *testing.T) {
		install(t, []string{"rpm"}, []string{"rpm"})
		got := strings.Fields(command(t, "rpm", "-qpl", rpms[0]))
		for _, want := range contents {
			if !slices.Contains(got, "/"+want) {
				t.Errorf("the .rpm has no /%s", want)
			}
		}
		conf := strings.Fields(command(t, "rpm", "-qpc", rpms[0]))
		if !slices.Contains(conf, "/etc/srtm/nsqd.toml") || len(conf) != len(units)+1 {
			t.Errorf("its configuration files are %q", conf)
		}
	})
	t.Run("deb", func(t *testing.T) {
		needs(t, "dpkg", "dpkg-deb", "chroot", "systemd-sysusers", "systemd-tmpfiles")
		if os.Geteuid() != 0 {
			t.Skip("not root")
		}
		testDeb(t, debs[0])
	})
}

var contents = []string{
	"usr/bin/nsqd", "usr/bin/loaddistributor", "usr/bin/tbadaptor", "usr/bin/srtm", "usr/bin/srtm-admission", "usr/bin/srtm-gateway",
	"usr/lib/systemd/system/srtm-nsqd.service", "usr/lib/systemd/system/srtm-loaddistributor.service", "etc/srtm/nsqd.toml", "etc/srtm/loaddistributor.toml",
	"usr/lib/sysusers.d/srtm.conf", "usr/share/doc/srtm/copyright", "usr/share/doc/srtm/operations.md", "usr/share/man/man7/srtm.7",
}

func testDeb(t *testing.T, deb string) {
	p := newPrefix(t)
	p.dpkg("-i", deb)
	p.dpkg("-i", deb) // again: the scripts may be repeated
	for _, path := range contents {
		_, err := os.Stat(p.at(path))
		testkit.NoError(t, err)
	}
	testkit.Equal(t, strings.Count(read(t, p.at("etc/passwd")), "\nsrtm:"), 1, "users srtm")

	state := p.at("var/lib/srtm/nsqd")
	if info, err := os.Stat(state); err != nil || info.Mode().Perm() != 0o700 {
		t.Fatalf("the state folder: %v, %v", info, err)
	}

	at, d := p.nsqd()
	ask(t, at, "/topic/create?topic=new", "")
	ask(t, at, "/channel/create?topic=new&channel=c", "")
	ask(t, at, "/pub?topic=new", "hello")
	has(t, at, "new", "c", 1, "aGVsbG8=")
	for _, other := range []struct {
		name  string
		flags []string // %s: an address
	}{
		{"loaddistributor", []string{"--http-address=%s", "--grpc-address=%s", "--tcp-address="}},
		{"tbadaptor", []string{"--http-address=%s", "--grpc-address=%s"}},
		{"admission", []string{"--http-address=%s", "--grpc-address=%s", "--udp-address=%s"}},
		{"gateway", []string{"--admin-address=%s", "--http-address=%s"}},
	} {
		ports := localtest.Ports(t, 3)
		for i, flag := range other.flags {
			if strings.Contains(flag, "%s") {
				other.flags[i] = fmt.Sprintf(flag, ports[i])
			}
		}
		p.run(other.name, ports[0]+"/healthz", other.flags...)
	}

	// An upgrade keeps configuration and stored data.
	write(t, p.at("etc/srtm/nsqd.toml"), read(t, p.at("etc/srtm/nsqd.toml"))+"log_level = \"debug\"\n")
	p.dpkg("-i", later(t, deb))
	testkit.Must(t, d.Stop())
	if conf := read(t, p.at("etc/srtm/nsqd.toml")); !strings.Contains(conf, "debug") || strings.Contains(conf, "next release") {
		t.Errorf("after an upgrade the configuration is\n%s", conf)
	}
	if next := read(t, p.at("etc/srtm/nsqd.toml.dpkg-dist")); !strings.Contains(next, "next release") {
		t.Errorf("and the default one is\n%s", next)
	}
	at, d = p.nsqd()
	has(t, at, "new", "c", 1, "aGVsbG8=")
	testkit.Must(t, d.Stop())

	p.dpkg("--remove", "srtm")
	if left := files(t, p.at("usr")); len(left) > 0 {
		t.Errorf("a removal leaves %q", left)
	}
	if !strings.Contains(read(t, p.at("etc/srtm/nsqd.toml")), "debug") || len(files(t, state)) == 0 {
		t.Error("a removal took configuration or data")
	}
	p.dpkg("--purge", "srtm")
	if left := files(t, p.at("etc/srtm")); len(left) > 0 || len(files(t, state)) == 0 {
		t.Errorf("a purge leaves %q of the configuration, and of the data %q", left, files(t, state))
	}
	if !strings.Contains(read(t, p.at("etc/passwd")), "srtm:") {
		t.Error("the user who owns the data is gone")
	}
}

// files returns the files below a folder; none if the folder does not exist.
func files(t *testing.T, dir string) (all []string) {
	t.Helper()
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			all = append(all, path)
		}
		return nil
	})
	return all
}
