package hook_test

import (
	"testing"

	"github.com/srtm-io/srtm/kernel/hook"
)

func TestSmoke(t *testing.T) {
	s := open(t, hook.EBPF, hook.Config{})
	t.Logf("%+v", s.Info())
}

