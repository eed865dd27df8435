//go:build !linux

package hook

import (
	"fmt"
	"runtime"
)

// sources is empty: only Linux reports when a segment arrived.
var sources []kind

func kernelRelease() string { return runtime.GOOS }

// Pin exists on Linux only.
func Pin(string, int, int, Config) error { return fmt.Errorf("pin: %w", ErrUnsupported) }
