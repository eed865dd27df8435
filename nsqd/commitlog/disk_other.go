//go:build !linux

package commitlog

import "os"

func (f osFile) Allocate(size int64) error { return fill(f, size) }

func syncData(f *os.File) error { return f.Sync() }
