//go:build !linux

package testkit

import "testing"

// SmallDisk is for Linux.
func SmallDisk(t testing.TB, bytes int) string {
	t.Helper()
	t.Skipf("no disk of %d bytes can be mounted on this system", bytes)
	return ""
}
