package controller

// FitHolds reports whether a topic's fit holds what it has measured: a search, a
// record of arrivals, or reports.
func (c *Controller) FitHolds(name string) bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	f := c.mu.fits[name]
	return f != nil && (f.search != nil || f.record != nil || f.sum.slices != nil)
}
