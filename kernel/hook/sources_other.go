//go:build !linux

package hook

import "runtime"

// sources is empty: only Linux lets a process ask when a segment arrived.
var sources []kind

func kernelRelease() string { return runtime.GOOS }
