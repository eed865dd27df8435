package session

import (
	"math"
	"time"

	"github.com/srtm-io/srtm/internal/faults"
)

// Config is shared by all sessions of a server. It must not change while a session uses it.
type Config struct {
	// MaxPacketSize is the maximum size of a PUBLISH in bytes, with its fixed header. If it is at most
	// the broker's maximum message size, no payload exceeds the broker's maximum.
	MaxPacketSize    int
	MaxInflight      int           // QoS 1 messages on their way in each direction
	MaxSessionExpiry time.Duration // a longer expiry is reduced to MaxSessionExpiry
	ConnectTimeout   time.Duration // from the connection's start to an accepted CONNECT
	MaxFilters       int           // subscriptions of a session
	MaxSources       int           // topics of all subscriptions of a session together
	MaxAliases       int           // topic aliases of a client
	MsgTimeout       time.Duration // time until an unacknowledged message is requeued
}

// DefaultConfig returns the defaults of nsqd.
func DefaultConfig() Config {
	return Config{
		MaxPacketSize:    1 << 20,
		MaxInflight:      256,
		MaxSessionExpiry: 24 * time.Hour,
		ConnectTimeout:   10 * time.Second,
		MaxFilters:       64,
		MaxSources:       256,
		MaxAliases:       16,
		MsgTimeout:       60 * time.Second,
	}
}

// Validate returns all faults of c at once.
func (c *Config) Validate() error {
	var errs faults.List
	const minPacket, maxPacket = 1 << 10, 256 << 20 // a CONNACK takes less; the protocol's maximum
	errs.If(c.MaxPacketSize < minPacket || c.MaxPacketSize > maxPacket, "--mqtt-max-packet-size %d bytes is outside [%d, %d]", c.MaxPacketSize, minPacket, maxPacket)
	errs.If(c.MaxInflight < 1 || c.MaxInflight > maxInflight, "--mqtt-max-inflight %d is outside [1, %d]", c.MaxInflight, maxInflight)
	const year = 365 * 24 * time.Hour
	errs.If(c.MaxSessionExpiry < 0 || c.MaxSessionExpiry > year, "--mqtt-max-session-expiry %v is outside [0, %v]", c.MaxSessionExpiry, year)
	errs.If(c.ConnectTimeout <= 0, "a connect timeout of %v", c.ConnectTimeout)
	const maxFilters = 1 << 12 // a SUBACK has a byte for each filter
	errs.If(c.MaxFilters < 1 || c.MaxFilters > maxFilters, "%d filters are outside [1, %d]", c.MaxFilters, maxFilters)
	errs.If(c.MaxSources < 1 || c.MaxSources > math.MaxUint16, "%d sources are outside [1, %d]", c.MaxSources, math.MaxUint16)
	errs.If(c.MaxAliases < 0 || c.MaxAliases > math.MaxUint8, "%d topic aliases are outside [0, %d]", c.MaxAliases, math.MaxUint8)
	return errs.Err()
}
