package session

import (
	"time"

	"github.com/srtm-io/srtm/nsq/wire"
)

// OpKind is the kind of an operation for the driver.
type OpKind uint8

// Kinds of operations, with the fields of Op that they set.
const (
	OpNone     OpKind = iota // nothing to do
	OpIdentify               // apply Session.Identity to the connection
	OpAuth                   // Body is the secret; the driver sets Reply to the JSON answer
	OpPub                    // Topic, Body
	OpMpub                   // Topic, Batch; all or nothing
	OpDpub                   // Topic, Body, Defer
	OpSub                    // Topic, Channel; deliver nothing before OpRdy
	OpRdy                    // Ready
	OpFin                    // ID
	OpReq                    // ID, Timeout
	OpTouch                  // ID
	OpCls                    // deliver nothing more; FIN, REQ and TOUCH may still come
	OpPace                   // Ready is the weight

	// Operations of MQTT (package mqtt/session), with the fields of Extra that they set. MQTT also has
	// OpPub, OpFin and OpTLS.
	OpConnect     // Connect
	OpSubscribe   // Filters
	OpUnsubscribe // Filters
	OpDisconnect  // PublishWill, SessionExpiry

	// The upgrades that IDENTIFY granted, in this order. The driver writes the output before an
	// upgrade. After the upgrade, all data is wrapped, beginning with the OK that Done adds to the
	// output.
	OpTLS     // serve TLS
	OpSnappy  // compress in both directions
	OpDeflate // compress in both directions; Level
)

// Upgrade reports whether the operation wraps the stream.
func (k OpKind) Upgrade() bool { return k >= OpTLS }

// verbAndCode returns the verb of the operation's command, and the code that answers the command if the
// driver's error has no code.
func (k OpKind) verbAndCode() (verb string, failed wire.ErrorCode) {
	table := [...]struct {
		verb   string
		failed wire.ErrorCode
	}{
		OpNone:        {"none", wire.CodeInvalid},
		OpIdentify:    {"IDENTIFY", wire.CodeIdentifyFailed},
		OpAuth:        {"AUTH", wire.CodeAuthFailed},
		OpPub:         {"PUB", wire.CodePubFailed},
		OpMpub:        {"MPUB", wire.CodeMpubFailed},
		OpDpub:        {"DPUB", wire.CodeDpubFailed},
		OpSub:         {"SUB", wire.CodeSubFailed},
		OpRdy:         {"RDY", wire.CodeInvalid},
		OpFin:         {"FIN", wire.CodeFinFailed},
		OpReq:         {"REQ", wire.CodeReqFailed},
		OpTouch:       {"TOUCH", wire.CodeTouchFailed},
		OpCls:         {"CLS", wire.CodeInvalid},
		OpPace:        {"PACE", wire.CodeInvalid},
		OpConnect:     {"CONNECT", wire.CodeIdentifyFailed},
		OpSubscribe:   {"SUBSCRIBE", wire.CodeSubFailed},
		OpUnsubscribe: {"UNSUBSCRIBE", wire.CodeSubFailed},
		OpDisconnect:  {"DISCONNECT", wire.CodeInvalid},
		OpTLS:         {"TLS", wire.CodeIdentifyFailed},
		OpSnappy:      {"snappy", wire.CodeIdentifyFailed},
		OpDeflate:     {"deflate", wire.CodeIdentifyFailed},
	}[k]
	return table.verb, table.failed
}

// String returns the verb of the operation's command.
func (k OpKind) String() string {
	verb, _ := k.verbAndCode()
	return verb
}

// Op is an operation for the driver. Its slices are views into the buffer passed to Step and are
// valid while the driver keeps the buffer.
type Op struct {
	Kind    OpKind
	Packet  uint16 // MQTT packet identifier; 0: NSQ, or a publish of QoS 0
	Topic   []byte
	Channel []byte
	Body    []byte
	Batch   wire.Batch
	Defer   time.Duration  // DPUB
	Ready   int            // RDY; PACE: the weight
	ID      wire.MessageID // FIN, REQ, TOUCH
	Timeout time.Duration  // REQ
	Level   int            // OpDeflate, in [1, 9]
	MQTT    *Extra         // nil: NSQ

	// Reply is set by the driver before Done, for OpAuth. After PACE the driver may also set Reply
	// for publishes, to replace OK.
	Reply []byte
}

// Failed returns the code for an operation that could not be carried out.
func (k OpKind) Failed() wire.ErrorCode {
	_, code := k.verbAndCode()
	return code
}

// Publishes reports whether the operation publishes. Publishes may be Done later, in their order.
func (k OpKind) Publishes() bool { return k == OpPub || k == OpMpub || k == OpDpub }
