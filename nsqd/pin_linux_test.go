package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	nsq "github.com/nsqio/go-nsq"
	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/kernel/stamp"
)

func TestOwnerParsesUserAndGroup(t *testing.T) {
	me, err := user.Current()
	testkit.Must(t, err)
	mine := me.Uid + ":" + me.Gid
	for s, want := range map[string]string{
		"0:7": "0:7", "4000001:4000002": "4000001:4000002", "4000001": "4000001:4000001",
		me.Uid: mine, me.Username: mine,
	} {
		if uid, gid, err := owner(s); err != nil || fmt.Sprintf("%d:%d", uid, gid) != want {
			t.Errorf("%q is %d:%d, %v, want %s", s, uid, gid, err, want)
		}
	}
	for _, s := range []string{"", "no such user", "1:", "1:wheel", "-1", "-1:1", "4294967296:1"} {
		if uid, gid, err := owner(s); err == nil {
			t.Errorf("%q is %d:%d", s, uid, gid)
		}
	}
}

// The test follows the instructions of docs/arrival-stamps.md: root pins the program, and a broker without privileges
// stamps exactly.
func TestAPinnedProgramServesABrokerWithoutPrivileges(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to become another user")
	}
	s, err := hook.Open(hook.EBPF, hook.Config{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Skipf("no program can be loaded here; kernel/hook tests whether it should: %v", err)
	}
	testkit.Must(t, s.Close())
	var uname unix.Utsname
	var major, minor int
	testkit.Must(t, unix.Uname(&uname))
	testkit.Result(fmt.Sscanf(unix.ByteSliceToString(uname.Release[:]), "%d.%d", &major, &minor)).Must(t)
	if major < 5 || major == 5 && minor < 19 {
		t.Skipf("before Linux 5.19 pinned maps need CAP_BPF; this is %d.%d", major, minor)
	}
	fs, err := os.MkdirTemp("", "nsqd") // t.TempDir is closed to others
	testkit.Must(t, err)
	testkit.Must(t, unix.Mount("bpf", fs, "bpf", 0, "mode=0711"))
	t.Cleanup(func() {
		testkit.NoError(t, errors.Join(unix.Unmount(fs, 0), os.Remove(fs)))
	})
	testkit.Must(t, os.Chmod(fs, 0o711))
	const nobody = 65534
	data := filepath.Join(fs+"-data", "nsqd")
	testkit.Must(t, errors.Join(os.MkdirAll(data, 0o755), os.Chown(data, nobody, nobody)))
	t.Cleanup(func() {
		testkit.NoError(t, os.RemoveAll(fs+"-data"))
	})
	dir := filepath.Join(fs, "stamps")
	for range 2 { // a second pin replaces the first
		testkit.Must(t, new(options).program().Execute(t.Context(), []string{"--pin-arrival-stamps=65534:65534", "--arrival-stamps-dir=" + dir, "--arrival-stamps-connections=100"}))
	}
	broker := exec.CommandContext(context.WithoutCancel(t.Context()), "/proc/self/exe", "--arrival-stamps=ebpf", "--arrival-stamps-dir="+dir, "--log-format=json",
		"--data-path="+data, "--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0", "--https-address=")
	broker.Dir = "/"
	broker.Env = append(os.Environ(), daemonEnv+"=1", "GOCOVERDIR="+os.TempDir())
	broker.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	logs := testkit.Result(broker.StderrPipe()).Must(t)
	testkit.Must(t, broker.Start())
	t.Cleanup(func() {
		testkit.NoError(t, errors.Join(broker.Process.Signal(syscall.SIGTERM), broker.Wait()))
	})
	var up struct{ Msg, TCP, HTTP string }
	lines := bufio.NewScanner(logs)
	for up.Msg != "nsqd is up" && lines.Scan() {
		t.Log(lines.Text())
		testkit.Must(t, json.Unmarshal(lines.Bytes(), &up))
	}
	if up.TCP == "" {
		t.Fatal("the broker does not come up")
	}
	status := testkit.Result(os.ReadFile(fmt.Sprintf("/proc/%d/status", broker.Process.Pid))).Must(t)
	if !strings.Contains(string(status), "CapEff:\t0000000000000000\n") {
		t.Fatalf("the broker has privileges:\n%s", status)
	}

	p, err := nsq.NewProducer(up.TCP, nsq.NewConfig())
	testkit.Must(t, err)
	defer p.Stop()
	p.SetLoggerLevel(nsq.LogLevelMax)
	for range 10 {
		testkit.Must(t, p.Publish("t", []byte("x")))
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	code, body := get(t, client, "http://"+up.HTTP+"/info")
	var info struct {
		Stamps hook.Info `json:"arrival_stamps"`
	}
	if err := json.Unmarshal([]byte(body), &info); err != nil {
		t.Fatalf("%d: %v", code, err)
	}
	if s := info.Stamps; s.Source != "ebpf" || !s.Pinned || s.Reason != "" || s.Counters.RingsMost != 100 || s.Counters.Arrivals[stamp.Exact] != 10 {
		t.Errorf("%s", body)
	}
}
