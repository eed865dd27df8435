//go:build !linux

package diskqueue

import "os"

func syncData(f *os.File) error { return f.Sync() }
