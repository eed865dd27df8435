package local

// PortsFrom is Ports of a process that begins after the given port.
func PortsFrom(last, count int) ([]string, error) {
	p := &ports{}
	p.mu.last = last
	return p.take(count)
}
