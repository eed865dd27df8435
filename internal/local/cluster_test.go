package local

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// script writes an executable shell script.
func script(t *testing.T, dir, name, text string) {
	t.Helper()
	testkit.Must(t, os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+text), 0o755))
}

func config(dir string) ClusterConfig {
	return ClusterConfig{Brokers: 2, Mcap: 10, BinDir: dir, LogDir: dir, StartTimeout: testkit.Hang}
}

func TestAProcessThatDiesAtOnceIsNamedWithItsLastWords(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"tbadaptor", "nsqd"} {
		script(t, dir, name, "exec sleep 60")
	}
	script(t, dir, "loaddistributor", "echo first; echo 'port is taken' >&2; exit 3")
	_, err := StartCluster(t.Context(), config(dir))
	if err == nil || !strings.Contains(err.Error(), "loaddistributor: exit status 3: port is taken") {
		t.Fatal(err)
	}
}

func TestAMissingBinaryIsNamedAndNothingKeepsRunning(t *testing.T) {
	dir := t.TempDir()
	script(t, dir, "tbadaptor", "exec sleep 60")
	_, err := StartCluster(t.Context(), config(dir))
	if !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "--bin-dir") {
		t.Fatal(err)
	}
}

func TestProcessesThatNeverJoinAreStopped(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"tbadaptor", "loaddistributor", "nsqd"} {
		script(t, dir, name, "exec sleep 60")
	}
	cfg := config(dir)
	cfg.StartTimeout = 300 * time.Millisecond
	_, err := StartCluster(t.Context(), cfg)
	if err == nil || !strings.Contains(err.Error(), "0 of 2 brokers have joined") {
		t.Fatal(err)
	}
}

func TestBadConfigsAreRefused(t *testing.T) {
	for _, c := range []ClusterConfig{{}, {Brokers: 101, Mcap: 1, StartTimeout: 1}, {Brokers: 1, StartTimeout: 1}, {Brokers: 1, Mcap: 1}} {
		if _, err := StartCluster(t.Context(), c); err == nil {
			t.Errorf("%+v was accepted", c)
		}
	}
}
