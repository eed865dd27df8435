//go:build !linux

package connlimit

// HungUp is unknown on this system.
func (c *Conn) HungUp() bool { return false }
