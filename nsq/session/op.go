package session

import (
	"time"

	"github.com/srtm-io/srtm/nsq/wire"
)

// OpKind says what the driver has to do.
type OpKind uint8

// The kinds of operation, and the fields of Op that each of them sets.
const (
	OpNone     OpKind = iota // nothing
	OpIdentify               // apply Session.Identity to the connection
	OpAuth                   // Body is the secret; set Reply to the JSON answer
	OpPub                    // Topic, Body
	OpMpub                   // Topic, Batch; all or nothing
	OpDpub                   // Topic, Body, Defer
	OpSub                    // Topic, Channel; deliver nothing until OpRdy
	OpRdy                    // Ready
	OpFin                    // ID
	OpReq                    // ID, Timeout
	OpTouch                  // ID
	OpCls                    // deliver nothing any more; FIN, REQ and TOUCH still come
	OpPace                   // Ready, which is the weight

	// The upgrades that IDENTIFY granted, in their order. Write the output
	// first. Once the operation is carried out, everything read and written is
	// wrapped, beginning with the OK that Done puts into the output.
	OpTLS     // serve TLS
	OpSnappy  // compress in both directions
	OpDeflate // likewise; Level
)

// Upgrade reports whether the operation changes how the stream is wrapped.
func (k OpKind) Upgrade() bool { return k >= OpTLS }

// about returns the verb of the command that led to the operation, and the code that answers
// it when the driver's error has none of its own.
func (k OpKind) about() (verb string, failed wire.ErrorCode) {
	about := [...]struct {
		verb   string
		failed wire.ErrorCode
	}{
		OpNone:     {"none", wire.CodeInvalid},
		OpIdentify: {"IDENTIFY", wire.CodeIdentifyFailed},
		OpAuth:     {"AUTH", wire.CodeAuthFailed},
		OpPub:      {"PUB", wire.CodePubFailed},
		OpMpub:     {"MPUB", wire.CodeMpubFailed},
		OpDpub:     {"DPUB", wire.CodeDpubFailed},
		OpSub:      {"SUB", wire.CodeSubFailed},
		OpRdy:      {"RDY", wire.CodeInvalid},
		OpFin:      {"FIN", wire.CodeFinFailed},
		OpReq:      {"REQ", wire.CodeReqFailed},
		OpTouch:    {"TOUCH", wire.CodeTouchFailed},
		OpCls:      {"CLS", wire.CodeInvalid},
		OpPace:     {"PACE", wire.CodeInvalid},
		OpTLS:      {"TLS", wire.CodeIdentifyFailed},
		OpSnappy:   {"snappy", wire.CodeIdentifyFailed},
		OpDeflate:  {"deflate", wire.CodeIdentifyFailed},
	}[k]
	return about.verb, about.failed
}

// String returns the verb of the command that led to the operation.
func (k OpKind) String() string {
	verb, _ := k.about()
	return verb
}

// Op is one operation for the driver. Its slices are views into the buffer
// given to Step and hold as long as the driver keeps those bytes.
type Op struct {
	Kind    OpKind
	Topic   []byte
	Channel []byte
	Body    []byte
	Batch   wire.Batch
	Defer   time.Duration  // DPUB
	Ready   int            // RDY; PACE: the weight
	ID      wire.MessageID // FIN, REQ, TOUCH
	Timeout time.Duration  // REQ
	Level   int            // OpDeflate, in [1, 9]

	// Reply is set by the driver before Done, for OpAuth, and for publishes of a client
	// that sent PACE if it is to be told something: then it is sent instead of OK.
	Reply []byte
}

// Failed returns the code that says that the operation could not be carried out.
func (k OpKind) Failed() wire.ErrorCode {
	_, code := k.about()
	return code
}

// Publishes reports whether the operation publishes: those may be Done later,
// in their order.
func (k OpKind) Publishes() bool { return k == OpPub || k == OpMpub || k == OpDpub }
