package deploy

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/testkit"
)

// The release notes are the section of the version that the programs name.
func TestReleaseNotes(t *testing.T) {
	needs(t, "make", "awk")
	notes := command(t, "make", "-s", "-C", top, "release-notes")
	changelog := read(t, filepath.Join(top, "CHANGELOG.md"))
	if !strings.Contains(changelog, "\n## "+program.Release) || len(notes) < 1000 || strings.Contains(notes, "\n## ") || !strings.Contains(changelog, notes) {
		t.Errorf("the release notes of %s are\n%s", program.Release, notes)
	}
}

// A user installs every command from the module, without the repository, its go.work and its caches. Run
// by `make test-install`.
func TestInstall(t *testing.T) {
	if os.Getenv("SRTM_INSTALL") == "" {
		t.Skip("make test-install: it downloads all modules and compiles every command, in minutes")
	}
	const module, version = "github.com/srtm-io/srtm", "v" + program.Release
	proxy, home := t.TempDir(), t.TempDir()
	t.Cleanup(func() { _ = exec.Command("chmod", "-R", "u+w", home).Run() }) // the module cache is read-only
	// The proxy has what a tag of this tree would give.
	at := filepath.Join(proxy, module, "@v", version)
	write(t, filepath.Join(filepath.Dir(at), "list"), version+"\n")
	write(t, at+".info", `{"Version": "`+version+`"}`)
	write(t, at+".mod", read(t, filepath.Join(top, "go.mod")))
	paths := []string{"archive", "--format=zip", "--prefix=" + module + "@" + version + "/", "-o", at + ".zip", "HEAD", "--", "."}
	for file := range strings.FieldsSeq(command(t, "git", "-C", top, "ls-files", "*/go.mod")) {
		paths = append(paths, ":!"+filepath.Dir(file)) // another module
	}
	pack := exec.Command("git", paths...)
	pack.Dir = top
	out, err := pack.CombinedOutput()
	if err != nil {
		t.Skipf("git archive: %v\n%s", err, out)
	}
	bin := filepath.Join(home, "bin")
	install := exec.Command("go", "install", "-trimpath", "-ldflags=-s -w")
	for _, name := range []string{"nsqd", "loaddistributor", "tbadaptor", "tools/srtm", "tools/iotpub", "tools/drlsim", "admission", "gateway"} {
		install.Args = append(install.Args, module+"/"+name+"@"+version)
	}
	install.Dir = home
	install.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=", "CGO_ENABLED=0", "GONOSUMDB="+module, "GOBIN="+bin,
		"GOMODCACHE="+filepath.Join(home, "modules"), "GOPROXY=file://"+proxy+","+strings.TrimSpace(command(t, "go", "env", "GOPROXY")))
	if out, err := install.CombinedOutput(); err != nil {
		t.Fatalf("go install: %v\n%s", err, out)
	}
	for _, name := range []string{"nsqd", "loaddistributor", "tbadaptor", "srtm", "iotpub", "drlsim", "admission", "gateway"} {
		if version := command(t, filepath.Join(bin, name), "--version"); !strings.Contains(version, program.Release) {
			t.Errorf("%s --version: %s", name, version)
		}
	}
	testkit.NoError(t, os.RemoveAll(bin))
}
