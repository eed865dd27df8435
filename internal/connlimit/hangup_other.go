//go:build !linux

package connlimit

// HungUp does not know.
func (c *Conn) HungUp() bool { return false }
