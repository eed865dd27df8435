package session

import "time"

// Extra is the part of an operation that only MQTT has. The session overwrites its Extra at the next
// Step. Attribute and Publisher are valid until the Answer of their operation, as Op's slices are. All
// other values are valid for as long as the driver wants.
type Extra struct {
	Attribute []byte // OpPub: record attribute, see package mqtt/names
	Publisher []byte // OpPub: publisher that the rule names; empty: the connection's identity
	Retain    bool   // OpPub: the client requests to retain the message, which the broker ignores
	Dropped   bool   // OpPub: the properties for receivers do not fit into Attribute, and are lost
	Source    uint16 // OpFin: number of the source that delivered the message

	Connect *Connect // OpConnect
	Filters []Filter // OpSubscribe, OpUnsubscribe; the driver sets each Reason
	Refusal string   // OpSubscribe: why the session has refused a filter; "": it has refused none, or the filter is malformed

	PublishWill   bool          // OpDisconnect: the driver publishes the will, otherwise the driver drops the will
	SessionExpiry time.Duration // OpDisconnect: how long the driver keeps the session from now on
}

// Connect is a request for an MQTT session.
type Connect struct {
	// ClientID is empty if the client has no client id. Then the driver sets a client id before
	// Answer.
	ClientID   string
	UserName   string
	Password   []byte
	CleanStart bool          // the driver drops the kept session
	Expiry     time.Duration // how long the driver keeps the session after the connection; 0: not at all
	Redirect   bool          // the client follows server references (user property srtm-redirect: 1)
	Will       *Will         // nil: none

	// Present is set by the driver before Answer. It means that the driver found a kept session.
	Present bool
}

// Will is the message that the broker publishes for a client whose connection has failed.
type Will struct {
	Topic     string // SRTM topic
	Attribute []byte
	Publisher string // as Extra.Publisher
	Body      []byte
	QoS       byte          // 0 or 1
	Delay     time.Duration // from the end of the connection
}

// Filter is a subscription of an MQTT client.
type Filter struct {
	Filter  string   // without $share/CHANNEL
	Share   string   // channel name of a shared subscription; "": not shared
	Channel string   // channel on each of Topics
	Topics  []string // SRTM topics that have messages for the filter
	ID      uint32   // subscription identifier; 0: none
	QoS     byte     // granted: 0 or 1
	NoLocal bool

	// Reason is the result, an MQTT reason code. The session sets the reason of a refused filter (0x80
	// or more) or of success. The driver carries out the successful filters, and sets the reason of a
	// failure.
	Reason byte
}
