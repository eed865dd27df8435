package deploy

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// probe runs inside the booted Debian. Each line of its output is "check: answer".
const probe = `#!/bin/bash
say() { echo "$1: $(eval "$2" 2>&1 | tr '\n' ' ')" >>/root/result; }
ping='curl -sS --retry 60 --retry-all-errors --retry-delay 1'
for unit in nsqd loaddistributor tbadaptor admission gateway; do
	say $unit "systemctl start srtm-$unit && systemctl is-active srtm-$unit"
	say "$unit runs as" "ps -o user= -p \$(systemctl show -P MainPID srtm-$unit)"
done
say ping "$ping http://127.0.0.1:4151/ping"
$ping -X POST 'http://127.0.0.1:4151/topic/create?topic=t'
$ping -X POST 'http://127.0.0.1:4151/channel/create?topic=t&channel=c'
$ping -d hello 'http://127.0.0.1:4151/pub?topic=t'
say restarted 'systemctl restart srtm-nsqd && systemctl is-active srtm-nsqd'
say stored "$ping 'http://127.0.0.1:4151/channel/peek?topic=t&channel=c'"
pid=$(systemctl show -P MainPID srtm-nsqd)
kill -9 $pid
$ping http://127.0.0.1:4151/ping
say 'after a kill' "systemctl is-active srtm-nsqd; [ \$(systemctl show -P MainPID srtm-nsqd) != $pid ] && echo 'another process'"
say upgraded 'dpkg -i /root/later.deb >/dev/null && systemctl is-active srtm-nsqd'
say failed 'systemctl list-units --state=failed --no-legend --plain "srtm-*"'
say removed 'dpkg --remove srtm >/dev/null; systemctl is-active srtm-nsqd'
systemctl poweroff
`

// The units of the .deb run under systemd, in a Debian that systemd-nspawn boots. Run by `make
// test-units`.
func TestUnitsUnderSystemd(t *testing.T) {
	folder := os.Getenv("SRTM_UNITS")
	if folder == "" {
		t.Skip("SRTM_UNITS names no folder with packages: make test-units, as root")
	}
	if os.Geteuid() != 0 {
		t.Skip("not root")
	}
	install(t, []string{"systemd-nspawn", "debootstrap", "dpkg-deb"}, []string{"systemd-container", "debootstrap", "dpkg"})
	// systemd-nspawn needs mounts, devices and namespaces, which a container without privileges refuses.
	if out, err := exec.Command("unshare", "--mount", "--uts", "--ipc", "--pid", "--net", "--fork", "mount", "-t", "tmpfs", "tmpfs", t.TempDir()).CombinedOutput(); err != nil {
		t.Skipf("root may not mount in namespaces of its own here: %v\n%s", err, out)
	}
	debs, _ := filepath.Glob(filepath.Join(folder, "*_"+runtime.GOARCH+".deb"))
	if len(debs) != 1 {
		t.Fatalf("%s has %q, want one package", folder, debs)
	}

	base := filepath.Join(testkit.Root(t), "build", "debian")
	if _, err := os.Stat(filepath.Join(base, "complete")); err != nil {
		testkit.Must(t, os.RemoveAll(base))
		out, err := exec.Command("debootstrap", "--variant=minbase", "--include=systemd,systemd-sysv,curl,procps", "stable", base).CombinedOutput()
		if err != nil {
			skipOffline(t, string(out))
			t.Fatalf("debootstrap cannot make a Debian: %v\n%s", err, tail(string(out), 1000))
		}
		write(t, filepath.Join(base, "complete"), "")
	}
	root := filepath.Join(t.TempDir(), "root")
	command(t, "cp", "-a", base, root)
	write(t, filepath.Join(root, "root/srtm.deb"), read(t, debs[0]))
	write(t, filepath.Join(root, "root/later.deb"), read(t, later(t, debs[0])))
	write(t, filepath.Join(root, "root/probe"), probe)
	testkit.Must(t, os.Chmod(filepath.Join(root, "root/probe"), 0o755))
	write(t, filepath.Join(root, "etc/systemd/system/probe.service"), "[Unit]\nAfter=network.target\n[Service]\nExecStart=/root/probe\n")
	testkit.Must(t, os.MkdirAll("/run/systemd/nspawn/propagate", 0o755))
	nspawn := func(args ...string) string {
		out, err := exec.Command("timeout", append([]string{"300", "systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--private-network", "--directory=" + root}, args...)...).CombinedOutput()
		// Without a systemd outside, nspawn cannot remove a folder at its end, and fails after its program's success.
		if err != nil && !strings.Contains(string(out), "propagate") {
			t.Fatalf("systemd-nspawn %q: %v\n%s", args, err, tail(string(out), 1000))
		}
		return string(out)
	}
	log := nspawn("sh", "-c", "dpkg --install /root/srtm.deb && touch /root/installed")
	if _, err := os.Stat(filepath.Join(root, "root/installed")); err != nil {
		t.Fatalf("dpkg --install has failed:\n%s", tail(log, 1000))
	}
	testkit.Must(t, os.MkdirAll(filepath.Join(root, "etc/systemd/system/multi-user.target.wants"), 0o755))
	testkit.Must(t, os.Symlink("/etc/systemd/system/probe.service", filepath.Join(root, "etc/systemd/system/multi-user.target.wants/probe.service")))
	log = nspawn("--boot")
	answers, err := os.ReadFile(filepath.Join(root, "root/result"))
	if err != nil {
		t.Fatalf("systemd does not boot in systemd-nspawn: %v\n%s", err, tail(log, 1000))
	}
	for _, want := range []string{
		"nsqd: active", "loaddistributor: active", "tbadaptor: active", "admission: active", "gateway: active", "nsqd runs as: srtm", "gateway runs as: srtm",
		"ping: OK", "restarted: active", "aGVsbG8=", "after a kill: active another process", "upgraded: active", "failed: \n", "removed: inactive",
	} {
		if !strings.Contains(string(answers), want) {
			t.Errorf("no %q in\n%s", want, answers)
		}
	}
}
