package mqtt

import (
	"context"
	"flag"
	"log/slog"

	"github.com/srtm-io/srtm/mqtt/session"
	nsq "github.com/srtm-io/srtm/nsq/session"
)

// Config is the configuration of a Server.
type Config struct {
	Session   session.Config // limits of sessions
	RulesFile string         // mapping rules; "": none
	Folder    string         // of the kept sessions, of this broker alone
	Log       *slog.Logger
	// Publish publishes the will of a client. Errors are *wire.Error. owner is the client's
	// authenticated identity, KIND:ID, or empty.
	Publish func(ctx context.Context, clientID, owner string, w *nsq.Will) error
	// ClaimChannel reports to the control plane that this broker keeps the latest session of the channel's client.
	ClaimChannel func(ctx context.Context, topic, channel string) error
	// DeleteChannel deletes a channel on all brokers. A missing channel is deleted. Error ErrInUse: used is
	// false, and the channel has consumers, or another broker has claimed the channel.
	DeleteChannel func(ctx context.Context, topic, channel string, used bool) error
}

// Flags defines the flags of MQTT, except the addresses.
func (c *Config) Flags(fs *flag.FlagSet) {
	c.Session = session.DefaultConfig()
	s := &c.Session
	fs.StringVar(&c.RulesFile, "mqtt-rules", "", "TOML `file` of rules that map MQTT topic names to topics; read again at SIGHUP (default none: a name that is a valid topic name maps to itself)")
	fs.IntVar(&s.MaxPacketSize, "mqtt-max-packet-size", s.MaxPacketSize, "maximum size of a PUBLISH packet, in `bytes`; at most --max-msg-size")
	fs.IntVar(&s.MaxInflight, "mqtt-max-inflight", s.MaxInflight, "maximum number of unacknowledged `messages` with QoS 1 of a client, in each direction")
	fs.DurationVar(&s.MaxSessionExpiry, "mqtt-max-session-expiry", s.MaxSessionExpiry, "maximum time that the session of a disconnected client is kept")
}
