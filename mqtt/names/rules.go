package names

// Rules map MQTT topic names to SRTM topics. The first rule that matches wins. A name without a rule
// that is a valid SRTM topic name maps to itself. The zero Rules has no rule. Rules do not change.
type Rules struct{}

// Parse reads a rules file and returns all faults of the file at once.
func Parse(text []byte) (*Rules, error) { return &Rules{}, nil }

// Target is where the messages of an MQTT topic name go.
type Target struct {
	Topic     []byte // SRTM topic
	Publisher []byte // identity of the publisher; empty: the connection's identity
	Envelope  bool   // NSQ consumers get a CloudEvents envelope
}

// Map returns the target of a valid topic name. Values that Map has to compose are appended to
// scratch, which Map returns. If the name has no SRTM topic, ok is false.
func (r *Rules) Map(name, scratch []byte) (t Target, grown []byte, ok bool) {
	return Target{}, scratch, false
}

// Topics returns the SRTM topics that may have messages whose names match a valid filter.
func (r *Rules) Topics(filter string) []string { return nil }

// SharedChannel returns the channel of $share/SHARE/FILTER. The channel is SHARE if the filter selects all
// messages of its topics, otherwise SHARE with a suffix that depends on the filter.
func (r *Rules) SharedChannel(share, filter string) string { return share }

// ClientChannel returns the channel of a client's subscriptions that are not shared.
func ClientChannel(clientID string, ephemeral bool) string { return "mqtt." + clientID }
