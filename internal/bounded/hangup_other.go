//go:build !linux

package bounded

// HungUp is unknown on this system.
func (c *Conn) HungUp() bool { return false }
