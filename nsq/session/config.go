package session

import (
	"time"

	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/nsq/wire"
)

// Limits of IDENTIFY that the protocol fixes.
const (
	MinHeartbeatInterval = time.Second
	MinMsgTimeout        = time.Second
	MinOutputBufferSize  = 64 // bytes
	MaxSampleRate        = 99 // percent

	// MaxIdentityText limits client_id, hostname and user_agent, each in bytes, because every
	// connection keeps them for its lifetime.
	MaxIdentityText = 256

	// defaultDeflateLevel applies if the client requests no level.
	defaultDeflateLevel = 6
)

// Config is shared by all sessions of a server. It must not change while a session uses it.
type Config struct {
	Limits wire.Limits

	HeartbeatInterval    time.Duration // default
	MaxHeartbeatInterval time.Duration

	MsgTimeout    time.Duration // default time until an unanswered message is requeued
	MaxMsgTimeout time.Duration // maximum for IDENTIFY, and for a message's time after TOUCH

	OutputBufferSize       int // default, bytes
	MaxOutputBufferSize    int
	OutputBufferTimeout    time.Duration // default
	MinOutputBufferTimeout time.Duration
	MaxOutputBufferTimeout time.Duration

	TLS             bool // offered
	TLSRequired     bool // before TLS, only IDENTIFY is allowed
	Snappy          bool // offered
	Deflate         bool // offered
	MaxDeflateLevel int  // in [1, 9]; a higher requested level is reduced to it

	// Forwarded permits AUTH by brokers that publish for their clients (nsq/origin), even if
	// AuthRequired is false.
	Forwarded    bool
	AuthRequired bool   // a client must AUTH before it publishes or subscribes
	Version      string // sent to clients
}

// DefaultConfig returns the documented defaults of upstream's nsqd.
func DefaultConfig() Config {
	return Config{
		Limits:                 wire.DefaultLimits(),
		HeartbeatInterval:      30 * time.Second,
		MaxHeartbeatInterval:   60 * time.Second,
		MsgTimeout:             60 * time.Second,
		MaxMsgTimeout:          15 * time.Minute,
		OutputBufferSize:       16 << 10,
		MaxOutputBufferSize:    64 << 10,
		OutputBufferTimeout:    250 * time.Millisecond,
		MinOutputBufferTimeout: 25 * time.Millisecond,
		MaxOutputBufferTimeout: 30 * time.Second,
		Snappy:                 true,
		Deflate:                true,
		MaxDeflateLevel:        6,
	}
}

// Validate returns all faults of c at once.
func (c *Config) Validate() error {
	var errs faults.List
	errs.Add(c.Limits.Validate())
	within := func(setting string, d, lo, hi time.Duration) {
		errs.If(d < lo || d > hi, "%s %v is outside [%v, %v]", setting, d, lo, hi)
	}
	const day = 24 * time.Hour
	within("--max-heartbeat-interval", c.MaxHeartbeatInterval, MinHeartbeatInterval, day)
	within("half of --client-timeout, the heartbeat interval", c.HeartbeatInterval, MinHeartbeatInterval, max(c.MaxHeartbeatInterval, MinHeartbeatInterval))
	within("--max-msg-timeout", c.MaxMsgTimeout, time.Millisecond, 365*day)
	within("--msg-timeout", c.MsgTimeout, time.Millisecond, max(c.MaxMsgTimeout, time.Millisecond))
	within("--min-output-buffer-timeout", c.MinOutputBufferTimeout, time.Millisecond, max(c.MaxOutputBufferTimeout, time.Millisecond))
	within("--max-output-buffer-timeout", c.MaxOutputBufferTimeout, time.Millisecond, day)
	within("--output-buffer-timeout", c.OutputBufferTimeout, c.MinOutputBufferTimeout, max(c.MaxOutputBufferTimeout, c.MinOutputBufferTimeout))
	unbounded := c.MaxOutputBufferSize < MinOutputBufferSize || c.MaxOutputBufferSize > 1<<30
	errs.If(unbounded, "--max-output-buffer-size %d bytes is outside [%d, %d]", c.MaxOutputBufferSize, MinOutputBufferSize, 1<<30)
	errs.If(!unbounded && (c.OutputBufferSize < MinOutputBufferSize || c.OutputBufferSize > c.MaxOutputBufferSize),
		"output buffer size of %d bytes is outside [%d, %d]", c.OutputBufferSize, MinOutputBufferSize, c.MaxOutputBufferSize)
	errs.If(c.MaxDeflateLevel < 1 || c.MaxDeflateLevel > 9, "--max-deflate-level %d is outside [1, 9]", c.MaxDeflateLevel)
	errs.If(c.TLSRequired && !c.TLS, "--tls-required needs --tls-cert and --tls-key")
	return errs.Err()
}
