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

// String returns the verb of the command that led to the operation.
func (k OpKind) String() string {
	switch k {
	case OpNone:
		return "none"
	case OpTLS:
		return "TLS"
	case OpSnappy:
		return "snappy"
	case OpDeflate:
		return "deflate"
	}
	return k.verb().String()
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

// Messages returns how many messages the operation publishes.
func (op *Op) Messages() int {
	switch op.Kind {
	case OpPub, OpDpub:
		return 1
	case OpMpub:
		return op.Batch.Len()
	}
	return 0
}

// Publishes reports whether the operation publishes: those may be Done later,
// in their order.
func (k OpKind) Publishes() bool { return k == OpPub || k == OpMpub || k == OpDpub }

func (k OpKind) verb() wire.Verb {
	switch k {
	case OpIdentify:
		return wire.VerbIdentify
	case OpAuth:
		return wire.VerbAuth
	case OpPub:
		return wire.VerbPub
	case OpMpub:
		return wire.VerbMpub
	case OpDpub:
		return wire.VerbDpub
	case OpSub:
		return wire.VerbSub
	case OpRdy:
		return wire.VerbRdy
	case OpFin:
		return wire.VerbFin
	case OpReq:
		return wire.VerbReq
	case OpTouch:
		return wire.VerbTouch
	case OpCls:
		return wire.VerbCls
	case OpPace:
		return wire.VerbPace
	}
	return wire.VerbNone
}

// failed is the code that answers the operation when the driver's error has
// none of its own.
func (k OpKind) failed() wire.ErrorCode {
	switch k {
	case OpIdentify, OpTLS, OpSnappy, OpDeflate:
		return wire.CodeIdentifyFailed
	case OpAuth:
		return wire.CodeAuthFailed
	case OpPub:
		return wire.CodePubFailed
	case OpMpub:
		return wire.CodeMpubFailed
	case OpDpub:
		return wire.CodeDpubFailed
	case OpSub:
		return wire.CodeSubFailed
	case OpFin:
		return wire.CodeFinFailed
	case OpReq:
		return wire.CodeReqFailed
	case OpTouch:
		return wire.CodeTouchFailed
	}
	return wire.CodeInvalid
}
