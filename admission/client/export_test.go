package client

import "github.com/srtm-io/srtm/internal/mono"

// SetClock is to be called before any lease is used.
func (c *Client) SetClock(now func() mono.Time) { c.leases.now = now }
