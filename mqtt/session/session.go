package session

import (
	"fmt"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/mqtt/names"
	"github.com/srtm-io/srtm/mqtt/packet"
	nsq "github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
)

// A busy session keeps up to busyBuffer of its output and of its arena, so that messages cost no
// allocation. A PINGREQ, or silence, shows that the client is idle. Then the session keeps idleBuffer.
const (
	busyBuffer = 2 << 10 // bytes
	idleBuffer = 64      // bytes
)

type state uint8

const (
	awaitTLS     state = iota // OpTLS is not carried out
	awaitConnect              // only CONNECT is allowed
	connecting                // CONNECT is not answered
	open
)

// Session is a client's protocol state. Create it with New and do not copy it. Not safe for concurrent
// use.
type Session struct {
	// Set once.
	cfg   *Config
	rules *names.Rules // replaced by UseRules

	state     state
	closing   bool
	barrier   bool // the last operation is neither a publish nor an OpFin
	version   byte // 0: before CONNECT
	terse     bool // the client wants no reason strings
	shortened bool // the server has reduced the session expiry
	warned    bool // the client was silent for two thirds of its patience
	idle      bool // the last packet is a PINGREQ
	window    uint16
	maxPacket int32 // bytes that the client accepts

	outstanding    int // operations that wait for their Answer
	unacknowledged int // QoS 1 publishes among them
	need           int
	fault          *Error // refusal to send when outstanding is 0
	cause          error  // why closing is set; nil: DISCONNECT

	// The client.
	clientID    string
	channel     string        // channel of plain subscriptions
	expiry      time.Duration // how long the driver keeps the session
	keepAlive   time.Duration // 0: none
	lastHeard   mono.Time     // time of the last packet, moved by late ticks
	wall        mono.Wall
	connectedAt mono.Wall
	published   uint64 // envelopes
	origin      uint64 // tag of the session's messages; 0: no filter with No Local

	filters  filterSet
	aliases  aliases
	inflight inflight

	extra nsq.Extra // of the current operation
	arena []byte    // attributes, publishers and envelopes of operations that wait for their Answer
	out   []byte    // packets for the driver
}

// New returns the session of a connection accepted at now. secure means that OpTLS is the first
// operation. Requires: cfg is valid and does not change while the session lives.
func New(cfg *Config, rules *names.Rules, secure bool, now mono.Time) *Session {
	s := &Session{cfg: cfg, rules: rules, state: awaitConnect, need: 1, lastHeard: now}
	if secure {
		s.state = awaitTLS
	}
	return s
}

// StepInto consumes at most one packet from the start of in, and returns the size n of the packet. The
// contract is the contract of nsq/session.StepInto. Requires: every earlier op has its Answer, except
// OpPub and OpFin, which may be answered later, in their order.
func (s *Session) StepInto(in []byte, now mono.Time, op *nsq.Op) (n int) {
	if s.barrier {
		panic("session: Step while an operation waits for Answer that is neither a publish nor an OpFin")
	}
	*op = nsq.Op{}
	if s.extra.Connect != nil || s.extra.Filters != nil {
		s.extra = nsq.Extra{}
	}
	if s.closing || s.fault != nil {
		return 0
	}
	if s.state == awaitTLS {
		op.Kind = nsq.OpTLS
		s.expect(op)
		return 0
	}
	if len(in) == 0 {
		s.need = 1
		return 0
	}
	if s.outstanding == 0 {
		s.arena = s.arena[:0]
	}
	err := s.admit(in[0])
	if err == nil {
		n, err = s.packet(in, op)
	}
	switch {
	case err != nil:
		*op = nsq.Op{}
		s.refuse(err)
		return 0
	case n == 0:
		return 0
	}
	s.lastHeard, s.warned, s.need = now, false, 1
	if op.Kind != nsq.OpNone {
		s.expect(op)
	}
	return n
}

// expect records that an operation waits for its Answer.
func (s *Session) expect(op *nsq.Op) {
	s.outstanding++
	s.barrier = op.Kind != nsq.OpPub && op.Kind != nsq.OpFin
}

// admit checks the first byte of a packet.
func (s *Session) admit(first byte) *Error {
	k, flags := packet.KindOf(first), first&15
	switch {
	case k == packet.Publish && flags&flagQoS2 != 0 && flags&flagQoS1 != 0:
		return malformed("PUBLISH with QoS 3")
	case k == packet.Publish && flags&flagDup != 0 && flags&(flagQoS1|flagQoS2) == 0:
		return malformed("PUBLISH with DUP and QoS 0")
	case k != packet.Publish && byte(k) != first:
		return malformed("%v with the flags %d", k, flags)
	case s.state == awaitConnect && k != packet.Connect:
		return violation("%v before CONNECT", k)
	case s.state != awaitConnect && k == packet.Connect:
		return violation("CONNECT twice")
	}
	switch k {
	case packet.Connect, packet.Puback, packet.Subscribe, packet.Unsubscribe, packet.PingRequest, packet.Disconnect:
		return nil
	case packet.Publish:
		switch {
		case flags&flagQoS2 != 0:
			return &Error{Reason: QoSUnsupported, Text: "PUBLISH with QoS 2, and the maximum is QoS 1"}
		case flags&flagRetain != 0 && s.version == packet.V5:
			return &Error{Reason: RetainUnsupported, Text: "PUBLISH with RETAIN, and the server retains no messages"}
		}
		return nil
	}
	return violation("%v from a client", k)
}

// packet decodes a packet of an admitted kind. It returns 0 if in does not have the whole packet.
func (s *Session) packet(in []byte, op *nsq.Op) (int, *Error) {
	size, header, fault := packet.Header(in)
	k := packet.KindOf(in[0])
	limit := s.cfg.MaxPacketSize
	if k != packet.Publish {
		limit = min(limit, maxControl)
	}
	switch {
	case fault != nil:
		return 0, malformed("%v", fault)
	case size > limit:
		return 0, &Error{Reason: PacketTooLarge, Text: fmt.Sprintf("%v of %d bytes, and the maximum is %d", k, size, limit)}
	case size == 0:
		s.need = len(in) + 1
		return 0, nil
	case size > len(in):
		s.need = size
		return 0, nil
	}
	r := packet.Reader{Rest: in[header:size:size]}
	var err *Error
	switch k {
	case packet.Publish:
		err = s.publish(in[0], &r, op)
	case packet.Puback:
		err = s.puback(&r, op)
	case packet.Connect:
		err = s.connect(&r, op)
	case packet.Subscribe, packet.Unsubscribe:
		err = s.subscribe(k, &r, op)
	case packet.Disconnect:
		err = s.disconnect(&r, op)
	case packet.PingRequest:
		if size != header {
			return 0, malformed("PINGREQ with fields")
		}
		s.release(true)
		s.out = append(s.out, byte(packet.PingReply), 0)
	}
	s.idle = k == packet.PingRequest
	return size, err
}

// Answer reports the outcome of an operation, and adds the packet that answers the operation, if any,
// to the output. An OpPub needs only Kind and Packet, an OpFin only Kind.
func (s *Session) Answer(op *nsq.Op, err error) {
	if op.Kind == nsq.OpNone || s.outstanding == 0 {
		panic(fmt.Sprintf("session: Answer of %v with %d operations outstanding", op.Kind, s.outstanding))
	}
	s.outstanding--
	s.barrier = s.barrier && s.outstanding > 0
	if s.closing {
		return // an earlier operation ended the session
	}
	switch op.Kind {
	case nsq.OpPub:
		s.answerPublish(op, err)
	case nsq.OpTLS:
		if s.state = awaitConnect; err != nil {
			s.close(errorOf(err))
		}
	case nsq.OpConnect:
		s.answerConnect(op.MQTT.Connect, err)
	case nsq.OpSubscribe:
		s.answerFilters(packet.Suback, op, err)
	case nsq.OpUnsubscribe:
		s.answerFilters(packet.Unsuback, op, err)
	case nsq.OpDisconnect:
		s.closing, s.need = true, 0
	}
	if s.fault != nil && s.outstanding == 0 && !s.closing {
		s.close(s.fault)
	}
}

// Disconnect ends the session on behalf of the driver. A 5.0 client gets the reason.
func (s *Session) Disconnect(e *Error) {
	if !s.closing {
		s.refuse(e)
	}
}

// Refuse is Disconnect for an error in the form of NSQ.
func (s *Session) Refuse(e *wire.Error) { s.Disconnect(&Error{Reason: ReasonOf(e), Text: e.Text}) }

// refuse ends the session, after the outstanding answers.
func (s *Session) refuse(e *Error) {
	if s.outstanding > 0 {
		s.fault, s.need = e, 0
		return
	}
	s.close(e)
}

func (s *Session) close(e *Error) {
	switch {
	case s.version == 0:
	case s.state != open:
		s.refuseConnect(e)
	case s.version == packet.V5:
		s.out = appendPacket(s.out, packet.Disconnect, func(dst []byte) []byte {
			return s.appendReason(append(dst, byte(e.Reason)), e.Text, e.ServerReference)
		})
	}
	s.closing, s.cause, s.need = true, e, 0
}

// UseTime sets the wall time for the envelopes of the next Steps.
func (s *Session) UseTime(wall mono.Wall) { s.wall = wall }

// Restricted reports whether the driver has yet to accept the CONNECT.
func (s *Session) Restricted() bool { return s.state != open }

// Version returns the protocol level: 4 (3.1.1) or 5, or 0 before CONNECT.
func (s *Session) Version() byte { return s.version }

// Need returns how many bytes in total the next Step needs to make progress. 0 means that no Step will
// make progress.
func (s *Session) Need() int { return s.need }

// Output returns the packets to write, oldest first. The session owns the slice, which is valid until
// the next call of any other method. A driver that does not write must not read either, or the output
// grows.
func (s *Session) Output() []byte { return s.out }

// ClearOutput records that the driver has taken the output.
func (s *Session) ClearOutput() {
	s.out = s.out[:0]
	s.release(s.idle)
}

// release frees unused buffers that are larger than the session keeps.
func (s *Session) release(idle bool) {
	limit := busyBuffer
	if idle {
		limit = idleBuffer
		if s.inflight.count == 0 {
			s.inflight.slots = nil
		}
	}
	if len(s.out) == 0 && cap(s.out) > limit {
		s.out = nil
	}
	if s.outstanding == 0 && cap(s.arena) > limit {
		s.arena = nil
	}
}

// Closing reports whether to close the connection after writing the output, and the cause, an *Error. The
// cause is nil after a DISCONNECT of the client.
func (s *Session) Closing() (closing bool, cause error) { return s.closing, s.cause }

// patience returns how long the client may be silent; 0: forever.
func (s *Session) patience() time.Duration {
	if s.state != open {
		return s.cfg.ConnectTimeout
	}
	return s.keepAlive + s.keepAlive/2
}

// Deadline returns when to call Tick, or mono.Never. Only Tick and OpConnect can make the deadline
// earlier.
func (s *Session) Deadline() mono.Time {
	patience := s.patience()
	switch {
	case s.closing || patience == 0:
		return mono.Never
	case s.warned:
		return s.lastHeard.Add(patience)
	}
	return s.lastHeard.Add(patience - patience/3)
}

// Tick ends the session if the client was silent for 1.5 times its keep alive, or has not sent its
// CONNECT in time. A server that was stopped for a minute must not close clients whose packets wait in the
// socket. So a client has a third of the time after a tick that comes late.
func (s *Session) Tick(now mono.Time) {
	due, patience := s.Deadline(), s.patience()
	if s.closing || now.Before(due) {
		return
	}
	if !s.warned || now.Sub(due) > patience/3 {
		s.lastHeard, s.warned = now.Add(patience/3-patience), true
		s.release(true)
		return
	}
	e := &Error{Reason: KeepAliveTimeout, Text: "no packet for 1.5 times the keep alive"}
	if s.state != open {
		e.Text = "no CONNECT in time"
	}
	s.close(e)
}

// Heard records that the client is alive. It is for a driver that leaves a client's packets unread.
func (s *Session) Heard(now mono.Time) { s.lastHeard, s.warned = max(s.lastHeard, now), false }

// LastCommand returns the time of the last packet, or of the connection's start.
func (s *Session) LastCommand() mono.Time { return s.lastHeard }

// Identity returns the client's id and keep alive in the form of NSQ.
func (s *Session) Identity() nsq.Identity {
	return nsq.Identity{ClientID: s.clientID, HeartbeatInterval: s.keepAlive, MsgTimeout: s.cfg.MsgTimeout}
}
