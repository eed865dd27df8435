package durable

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestReplace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	for _, text := range []string{"a longer text", "text"} {
		testkit.Must(t, Replace(path, []byte(text)))
		if got, err := os.ReadFile(path); err != nil || string(got) != text {
			t.Errorf("%q, %v; want %q", got, err, text)
		}
	}
	if left, err := os.ReadDir(filepath.Dir(path)); err != nil || len(left) != 1 {
		t.Errorf("%v, %v", left, err)
	}
}

func TestReplaceThatFailsLeavesTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	testkit.Must(t, os.MkdirAll(filepath.Join(path, "in the way"), 0o700))
	if err := Replace(path, []byte("text")); err == nil {
		t.Error("a folder was replaced")
	}
	if left, err := os.ReadDir(filepath.Dir(path)); err != nil || len(left) != 1 {
		t.Errorf("%v, %v", left, err)
	}
}
