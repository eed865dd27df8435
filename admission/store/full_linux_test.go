package store

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestOpenOnAFullDiskSaysSo(t *testing.T) {
	disk := testkit.SmallDisk(t, 64<<10)
	// The disk keeps room for the empty files of the store, and for nothing in them.
	if err := os.WriteFile(filepath.Join(disk, "fill"), make([]byte, 64<<10), 0o600); !errors.Is(err, syscall.ENOSPC) {
		testkit.Must(t, err)
	}
	s, err := Open(t.Context(), filepath.Join(disk, "admission.db"))
	if err == nil {
		s.Close()
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("the store opens with %v", err)
	}
}
