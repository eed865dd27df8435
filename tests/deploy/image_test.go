package deploy

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// engine are the Debian packages that build and run images.
var engine = []string{
	"buildah", "podman", "podman-compose", "runc", "busybox-static", "ca-certificates", "iptables", "curl",
	"containernetworking-plugins", "golang-github-containernetworking-plugin-dnsname",
}

// containers are the images and containers of one test, in a network namespace, where the ports of
// deploy/compose.yaml are free.
type containers struct {
	t     *testing.T
	dir   string
	space testkit.Namespace
	files uint64 // limit of open files in a container
}

// newContainers installs what is missing of the engine, and configures the engine to keep everything in
// a folder of the test.
func newContainers(t *testing.T) *containers {
	t.Helper()
	space := testkit.NewNamespace(t)
	programs := []string{"buildah", "podman", "podman-compose", "runc", "busybox", "iptables", "nsenter", "curl"}
	install(t, programs, engine)
	var files, processes syscall.Rlimit
	testkit.Must(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files))
	const nproc = 6 // RLIMIT_NPROC
	testkit.Must(t, syscall.Getrlimit(nproc, &processes))
	c := &containers{t, t.TempDir(), space, min(files.Max, 65536)}
	write(t, filepath.Join(c.dir, "storage.conf"), fmt.Sprintf("[storage]\ndriver = \"overlay\"\ngraphroot = %q\nrunroot = %q\n", c.dir+"/store", c.dir+"/run"))
	// Without CAP_SYS_RESOURCE the engine cannot raise its limits, so containers have the limits of the test.
	write(t, filepath.Join(c.dir, "containers.conf"), fmt.Sprintf(`[containers]
default_ulimits = ["nofile=%d:%[1]d", "nproc=%d:%[2]d"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
[network]
network_config_dir = %q
`, c.files, min(processes.Max, 4096), c.dir+"/networks"))
	testkit.Must(t, os.MkdirAll(filepath.Join(c.dir, "networks"), 0o755))
	t.Setenv("CONTAINERS_STORAGE_CONF", filepath.Join(c.dir, "storage.conf"))
	t.Setenv("CONTAINERS_CONF", filepath.Join(c.dir, "containers.conf"))
	t.Cleanup(func() {
		c.inside("podman", "rm", "--force", "--all", "--volumes")
		_ = syscall.Unmount(filepath.Join(c.dir, "store", "overlay"), syscall.MNT_DETACH) // if the engine left it
	})
	return c
}

// of returns c for a subtest.
func (c containers) of(t *testing.T) *containers {
	c.t = t
	return &c
}

// inside runs a program in the namespace. "ip netns exec" would hide the cgroups.
func (c *containers) inside(args ...string) string {
	c.t.Helper()
	return command(c.t, "nsenter", append([]string{"--net=/run/netns/" + c.space.Name}, args...)...)
}

// build builds deploy/Dockerfile. The Dockerfile's image of Go comes from a registry; here an image with
// this machine's Go takes its place, and shares the caches of Go.
func (c *containers) build() {
	c.t.Helper()
	base := filepath.Join(c.dir, "base")
	write(c.t, filepath.Join(base, "Dockerfile"), fmt.Sprintf(`FROM scratch
COPY busybox /bin/busybox
RUN ["/bin/busybox", "--install", "-s", "/bin"]
RUN mkdir -m 1777 /tmp
COPY ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
ENV PATH=/usr/local/go/bin:/bin GOTOOLCHAIN=local GOPROXY=%s GOMODCACHE=/modules GOCACHE=/cache HOME=/root
`, goEnv(c.t, "GOPROXY")))
	busybox := testkit.Result(exec.LookPath("busybox")).Must(c.t)
	testkit.Must(c.t, os.WriteFile(filepath.Join(base, "busybox"), []byte(read(c.t, busybox)), 0o755))
	write(c.t, filepath.Join(base, "ca-certificates.crt"), read(c.t, "/etc/ssl/certs/ca-certificates.crt"))
	name := strings.Fields(read(c.t, filepath.Join(top, "deploy", "Dockerfile")))
	for i, word := range name {
		if word == "FROM" {
			name = name[i+1:]
			break
		}
	}
	command(c.t, "buildah", "bud", "--isolation=chroot", "-t", "localhost/"+name[0], base)
	command(c.t, "buildah", "bud", "--isolation=chroot", "--pull-never",
		"--volume="+goEnv(c.t, "GOROOT")+":/usr/local/go:ro", "--volume="+goEnv(c.t, "GOMODCACHE")+":/modules", "--volume="+goEnv(c.t, "GOCACHE")+":/cache",
		"-f", filepath.Join(top, "deploy", "Dockerfile"), "-t", "srtm", top)
}

func goEnv(t *testing.T, name string) string {
	t.Helper()
	return strings.TrimSpace(command(t, "go", "env", name))
}

// curl sends a request to a container, until it answers.
func (c *containers) curl(args ...string) string {
	c.t.Helper()
	args = append([]string{"--net=/run/netns/" + c.space.Name, "curl", "-sS", "--fail", "--retry", "100", "--retry-all-errors", "--retry-delay", "1"}, args...)
	curl := exec.Command("nsenter", args...)
	var failures strings.Builder // of each attempt
	curl.Stderr = &failures
	out, err := curl.Output()
	if err != nil {
		c.t.Fatalf("curl %q: %v\n%s", args, err, &failures)
	}
	return string(out)
}

// The image runs a broker without privileges and on a read-only root, and the compose file runs a
// cluster. Run by `make test-image`.
func TestImage(t *testing.T) {
	if os.Getenv("SRTM_IMAGE") == "" || runtime.GOOS != "linux" {
		t.Skip("make test-image, as root: it builds the image, with buildah and podman from Debian")
	}
	c := newContainers(t)
	c.build()
	t.Run("broker", func(t *testing.T) {
		c := c.of(t)
		c.inside("podman", "run", "--detach", "--name=broker", "--network=host", "--read-only", "--cap-drop=all", "--security-opt=no-new-privileges", "srtm")
		testkit.Equal(t, c.curl("http://127.0.0.1:4151/ping"), "OK", "ping")
		c.curl("-X", "POST", "http://127.0.0.1:4151/topic/create?topic=t")
		c.curl("-X", "POST", "http://127.0.0.1:4151/channel/create?topic=t&channel=c")
		c.curl("-d", "hello", "http://127.0.0.1:4151/pub?topic=t")
		c.inside("podman", "stop", "--time=60", "broker")
		testkit.Equal(t, strings.TrimSpace(c.inside("podman", "inspect", "--format={{.State.ExitCode}}", "broker")), "0", "exit code after SIGTERM")
		c.inside("podman", "start", "broker")
		if peek := c.curl("http://127.0.0.1:4151/channel/peek?topic=t&channel=c"); !strings.Contains(peek, "aGVsbG8=") {
			t.Errorf("after a restart the channel has %s", peek)
		}
		c.inside("podman", "rm", "--force", "--volumes", "broker")
	})
	t.Run("other programs", func(t *testing.T) {
		c := c.of(t)
		for _, program := range []string{"loaddistributor", "tbadaptor", "srtm", "admission", "gateway"} {
			if out := c.inside("podman", "run", "--rm", "--network=none", "srtm", program, "--version"); !strings.Contains(out, "SRTM ") {
				t.Errorf("%s --version: %s", program, out)
			}
		}
	})
	t.Run("cluster", func(t *testing.T) {
		c := c.of(t)
		file := filepath.Join(c.dir, "compose.yaml")
		// podman-compose has no other way to set a limit that the file does not name.
		write(t, file, strings.Replace(read(t, filepath.Join(top, "deploy", "compose.yaml")), "nofile: 65536", fmt.Sprintf("nofile: %d\n    nproc: 4096", c.files), 1))
		c.inside("podman-compose", "-p", "srtm", "-f", file, "up", "--detach")
		testkit.WaitFor(t, "two brokers of the compose file", func() bool {
			out := c.inside("podman", "exec", "srtm_loaddistributor_1", "srtm", "broker", "list")
			return strings.Count(out, " connected ") == 2
		})
		c.inside("podman", "exec", "srtm_loaddistributor_1", "srtm", "topic", "create", "orders", "--rate=100", "--burst=10", "--channel=billing")
		testkit.Equal(t, c.curl("-d", "hello", "http://127.0.0.1:4151/pub?topic=orders"), "OK", "publish")
		lookup := c.curl("http://127.0.0.1:4161/lookup?topic=orders")
		if !strings.Contains(lookup, `"broadcast_address":"broker`) {
			t.Errorf("the lookup answers %s", lookup)
		}
		tail := c.inside("podman", "exec", "srtm_loaddistributor_1", "srtm", "tail", "orders", "--channel=billing", "--count=1")
		if !strings.Contains(tail, "hello") {
			t.Errorf("a consumer gets %q", tail)
		}
		c.inside("podman-compose", "-p", "srtm", "-f", file, "down", "--volumes")
		c.inside("podman", "network", "rm", "--force", "srtm_default")
	})
}
