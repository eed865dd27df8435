package session

import (
	"errors"
	"fmt"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/origin"
	"github.com/srtm-io/srtm/nsq/wire"
)

// ErrSilent is the cause of a close after two heartbeat intervals without a command. No error frame
// is sent.
var ErrSilent = errors.New("client sent no command for two heartbeat intervals")

// A server holds thousands of idle sessions and a few busy ones. A busy session keeps up to
// busyOutput of its output buffer, so that replies cost no allocation (800 replies between two
// ClearOutput). At the next heartbeat the session keeps only idleOutput.
const (
	busyOutput = 8 << 10 // bytes
	idleOutput = 256     // bytes
)

type state uint8

const (
	awaitMagic  state = iota // only the magic is allowed
	connected                // after the magic
	subscribed               // after SUB
	closingWait              // after CLS
)

// Session is a client's protocol state. Create it with New and do not copy it. Not safe for
// concurrent use.
type Session struct {
	// Set once.
	cfg *Config

	// State that decides which commands the client may send.
	state      state
	authorised bool // AUTH succeeded
	attributes bool // see UseAttributes
	closing    bool // Step, Done and Tick have no further effect on the client
	identity   Identity
	upgrades   [2]OpKind // granted and not returned by Step yet, OpNone last
	encrypted  bool      // OpTLS was carried out
	wrapped    bool      // an upgrade was carried out

	// Operations returned by Step and not yet Done. Publishes and FINs may accumulate. Any other
	// operation must be the last, because the meaning of the next command depends on it. Invariant:
	// barrier implies outstanding > 0.
	outstanding int32
	barrier     bool // the last operation is neither a publish nor a FIN

	need          int         // bytes that the next Step needs
	walk          wire.Walk   // state of an incomplete command
	lastHeard     mono.Time   // time of the last command, moved by late ticks
	nextHeartbeat mono.Time   // time of the next heartbeat, if enabled
	fault         *wire.Error // refusal to send when outstanding is 0
	cause         error       // why closing is set

	out []byte // frames for the driver
}

// New returns the session of a connection accepted at now. Requires: cfg is valid and does not
// change while the session lives.
func New(cfg *Config, now mono.Time) *Session {
	return &Session{
		cfg:           cfg,
		identity:      defaultIdentity(cfg),
		need:          len(wire.Magic),
		lastHeard:     now,
		nextHeartbeat: now.Add(cfg.HeartbeatInterval),
	}
}

// Step consumes at most one command (or first the magic) from the start of in, and returns its size
// n.
//
// The driver must carry out an op other than OpNone and answer it with Done. An upgrade has n == 0.
// OpNone with n > 0 requires nothing from the driver. With OpNone and n == 0, Step needs more
// bytes, Need in total, or the session is closing (see Closing). A refused command is not consumed.
//
// Requires: every earlier op is Done. Only OpPub, OpMpub, OpDpub and OpFin may be Done later, in
// their order.
func (s *Session) Step(in []byte, now mono.Time) (n int, op Op) {
	n = s.StepInto(in, now, &op)
	return n, op
}

// StepInto is Step for a driver that reuses an Op, because copying an Op is a large part of the
// cost of a short command. The old value of op is overwritten.
func (s *Session) StepInto(in []byte, now mono.Time, op *Op) (n int) {
	if s.barrier {
		panic("session: Step while an operation waits for Done that is neither a publish nor a FIN")
	}
	*op = Op{}
	if s.closing || s.fault != nil {
		return 0
	}
	if s.state == awaitMagic {
		return s.stepMagic(in, now)
	}
	if s.upgrades[0] != OpNone {
		*op = s.stepUpgrade(in)
		return 0
	}
	if s.Restricted() {
		if fault := s.barred(wire.PeekVerb(in)); fault != nil {
			s.refuse(fault)
			return 0
		}
	}
	var cmd wire.Command
	limits := &s.cfg.Limits
	if s.attributes {
		own := s.cfg.Limits
		own.Attributes, limits = true, &own
	}
	n, need, err := cmd.Parse(in, limits, &s.walk)
	if err != nil {
		s.refuse(err)
		return 0
	}
	if n == 0 {
		s.need = need
		return 0
	}
	if fault := s.admit(&cmd, now, op); fault != nil {
		s.refuse(fault)
		*op = Op{}
		return 0
	}
	s.lastHeard = now
	s.need = 1
	switch op.Kind {
	case OpNone:
	case OpPub, OpMpub, OpDpub, OpFin:
		s.outstanding++
	default:
		s.outstanding++
		s.barrier = true
	}
	return n
}

// stepUpgrade returns the next upgrade. Bytes that the client sent before the answer have the old
// wrapping and would be decoded with the new wrapping, so they are refused.
func (s *Session) stepUpgrade(in []byte) Op {
	if len(in) > 0 {
		s.refuse(invalid("%d bytes before the upgrade to %v", len(in), s.upgrades[0]))
		return Op{}
	}
	op := Op{Kind: s.upgrades[0], Level: s.identity.DeflateLevel}
	s.upgrades = [2]OpKind{s.upgrades[1]}
	s.outstanding++
	s.barrier = true
	return op
}

func (s *Session) stepMagic(in []byte, now mono.Time) int {
	n, err := wire.ParseMagic(in)
	if err != nil {
		s.refuse(err)
		return 0
	}
	if n > 0 {
		s.state = connected
		s.lastHeard = now
		s.need = 1
	}
	return n
}

// Restricted reports whether the client has yet to complete the required TLS or AUTH. Until then
// most commands are refused by their verb, before their body has arrived.
func (s *Session) Restricted() bool {
	return s.cfg.TLSRequired && !s.encrypted || s.cfg.AuthRequired && !s.authorised
}

// barred returns why a restricted client may not use the verb.
func (s *Session) barred(v wire.Verb) *wire.Error {
	switch v {
	case wire.VerbNone, wire.VerbIdentify: // unknown commands are refused elsewhere
		return nil
	}
	if s.cfg.TLSRequired && !s.encrypted {
		return notNow(v, "before TLS, which is required: IDENTIFY with tls_v1")
	}
	switch v {
	case wire.VerbPub, wire.VerbMpub, wire.VerbDpub, wire.VerbSub:
		return wire.NewError(wire.CodeAuthFirst, v.String()+" needs AUTH first")
	}
	return nil
}

// admit applies the rules of the state to a well-formed command. It fills op and updates the state,
// or it refuses the command and changes nothing.
func (s *Session) admit(cmd *wire.Command, now mono.Time, op *Op) *wire.Error {
	switch cmd.Verb {
	case wire.VerbNop:

	case wire.VerbPub, wire.VerbMpub, wire.VerbDpub, wire.VerbSub:
		op.Topic = cmd.Topic
		switch cmd.Verb {
		case wire.VerbPub:
			op.Kind, op.Body = OpPub, cmd.Body
		case wire.VerbMpub:
			op.Kind, op.Batch = OpMpub, cmd.Batch
		case wire.VerbDpub:
			op.Kind, op.Body, op.Defer = OpDpub, cmd.Body, cmd.Delay
		case wire.VerbSub:
			if s.state != connected {
				return notNow(cmd.Verb, "after SUB")
			}
			if s.identity.HeartbeatInterval == 0 {
				// A consumer that vanishes would keep its messages forever.
				return notNow(cmd.Verb, "with heartbeats switched off")
			}
			op.Kind, op.Channel = OpSub, cmd.Channel
			s.state = subscribed
		}

	case wire.VerbRdy, wire.VerbFin, wire.VerbReq, wire.VerbTouch, wire.VerbCls:
		if s.state == connected {
			fault := notNow(cmd.Verb, "before SUB")
			if cmd.Verb == wire.VerbCls {
				fault.Cause = ErrClosedUnsubscribed
			}
			return fault
		}
		switch cmd.Verb {
		case wire.VerbRdy:
			// After CLS, the client may still lower its RDY.
			if s.state == subscribed {
				op.Kind, op.Ready = OpRdy, cmd.Ready
			}
		case wire.VerbFin:
			op.Kind, op.ID = OpFin, cmd.ID
		case wire.VerbReq:
			op.Kind, op.ID, op.Timeout = OpReq, cmd.ID, cmd.Delay
		case wire.VerbTouch:
			op.Kind, op.ID = OpTouch, cmd.ID
		case wire.VerbCls:
			if s.state == closingWait {
				return notNow(cmd.Verb, "twice")
			}
			op.Kind = OpCls
			s.state = closingWait
		}

	case wire.VerbPace:
		switch {
		case s.cfg.TLSRequired && !s.encrypted:
			return notNow(cmd.Verb, "before TLS, which is required: IDENTIFY with tls_v1")
		case s.Restricted():
			return wire.NewError(wire.CodeAuthFirst, "PACE needs AUTH first")
		}
		op.Kind, op.Ready = OpPace, cmd.Ready

	case wire.VerbIdentify:
		switch {
		case s.state != connected:
			return notNow(cmd.Verb, "after SUB")
		case s.wrapped: // the upgrades cannot be repeated
			return notNow(cmd.Verb, "after an upgrade")
		}
		id, fault := negotiate(s.cfg, cmd.Body)
		if fault != nil {
			return fault
		}
		s.identity = id
		s.nextHeartbeat = now.Add(id.HeartbeatInterval)
		s.upgrades = upgradesOf(&id)
		op.Kind = OpIdentify

	case wire.VerbAuth:
		if !s.cfg.AuthRequired && !(s.cfg.Forwarded && origin.Is(cmd.Body)) {
			return wire.NewError(wire.CodeAuthDisabled, "AUTH is not enabled")
		}
		if s.authorised {
			return notNow(cmd.Verb, "twice")
		}
		op.Kind, op.Body = OpAuth, cmd.Body
	}
	return nil
}

func upgradesOf(id *Identity) (u [2]OpKind) {
	n := 0
	add := func(granted bool, k OpKind) {
		if granted {
			u[n] = k
			n++
		}
	}
	add(id.TLS, OpTLS)
	add(id.Snappy, OpSnappy)
	add(id.Deflate, OpDeflate)
	return u
}

func invalid(format string, args ...any) *wire.Error {
	return wire.NewError(wire.CodeInvalid, fmt.Sprintf(format, args...))
}

// ErrClosedUnsubscribed is the cause of the refusal of CLS without a subscription. Some client
// libraries always send CLS when they close, even as producers.
var ErrClosedUnsubscribed = errors.New("CLS of a client that does not subscribe")

func notNow(v wire.Verb, state string) *wire.Error {
	return wire.NewError(wire.CodeInvalid, v.String()+" "+state)
}

// Done reports the outcome of an operation and adds the command's reply, if any, to the output. A
// *wire.Error in err is sent as it is. For any other error Done sends the operation's failure code,
// and keeps err as the cause for the log. After a failed upgrade Done sends only a *wire.Error,
// because only the driver knows what the client can still read.
func (s *Session) Done(op Op, err error) { s.Answer(&op, err) }

// Answer is Done for a driver that reuses an Op.
func (s *Session) Answer(op *Op, err error) {
	if op.Kind == OpNone || s.outstanding == 0 {
		panic(fmt.Sprintf("session: Done of %v with %d operations outstanding", op.Kind, s.outstanding))
	}
	s.outstanding--
	s.barrier = s.barrier && s.outstanding > 0
	if s.closing {
		return // an earlier operation ended the conversation
	}
	if err == nil {
		err = s.reply(op)
	}
	if err != nil {
		s.fail(op, err)
	}
	if s.fault != nil && s.outstanding == 0 && !s.closing {
		s.close(s.fault)
	}
}

func (s *Session) reply(op *Op) error {
	switch op.Kind {
	case OpPub, OpMpub, OpDpub:
		if op.Reply != nil {
			s.out = wire.AppendResponse(s.out, op.Reply)
			break
		}
		s.out = wire.AppendResponse(s.out, wire.OK)
	case OpSub, OpPace:
		s.out = wire.AppendResponse(s.out, wire.OK)
	case OpTLS, OpSnappy, OpDeflate:
		s.encrypted = s.encrypted || op.Kind == OpTLS
		s.wrapped = true
		s.out = wire.AppendResponse(s.out, wire.OK)
	case OpCls:
		s.out = wire.AppendResponse(s.out, wire.CloseWait)
	case OpAuth:
		s.authorised = true
		s.out = wire.AppendResponse(s.out, op.Reply)
	case OpIdentify:
		r, err := s.identity.response(s.cfg)
		if err != nil {
			return fmt.Errorf("encode the answer to IDENTIFY: %w", err)
		}
		s.out = wire.AppendResponse(s.out, r)
	}
	return nil
}

func (s *Session) fail(op *Op, err error) {
	e := wireError(err)
	if e == nil {
		verb, code := op.Kind.verbAndCode()
		if op.Kind == OpFin || op.Kind == OpReq || op.Kind == OpTouch {
			verb += " " + op.ID.String()
		}
		e = wire.Wrap(code, verb+" failed", err)
		if op.Kind.Upgrade() {
			s.closing, s.cause, s.need = true, e, 0
			return
		}
	}
	if e.Fatal {
		s.close(e)
		return
	}
	s.out = wire.AppendError(s.out, e)
	if op.Kind == OpSub {
		s.state = connected // the client may try again
	}
}

// UseAttributes records that the client is a broker, and that the body of each message, in both
// directions, begins with an attribute (nsq/origin). Op has the bodies as they came.
func (s *Session) UseAttributes() { s.attributes = true }

// Refuse ends the conversation with e on behalf of the driver.
func (s *Session) Refuse(e *wire.Error) {
	if !s.closing {
		s.refuse(e)
	}
}

// refuse ends the conversation with err, after the outstanding replies.
func (s *Session) refuse(err error) {
	e := wireError(err)
	if e == nil {
		panic(fmt.Sprintf("session: refusal without a code: %v", err))
	}
	if s.outstanding > 0 {
		s.fault, s.need = e, 0
		return
	}
	s.close(e)
}

func (s *Session) close(e *wire.Error) {
	s.out = wire.AppendError(s.out, e)
	s.closing, s.cause, s.need = true, e, 0
}

// wireError returns the *wire.Error in err, or nil. It avoids the allocation of errors.As for a
// bare *wire.Error, with which a full topic answers every message.
func wireError(err error) *wire.Error {
	if e, ok := err.(*wire.Error); ok {
		return e
	}
	var e *wire.Error
	errors.As(err, &e)
	return e
}

// Need returns how many bytes in total the next Step needs to make progress, at most the limits'
// MaxCommandSize. 0 means that no Step will make progress.
func (s *Session) Need() int { return s.need }

// Output returns the frames to write, oldest first. The session owns the slice, which is valid
// until the next call of any other method. A driver that does not write must not read either, or
// the output grows.
func (s *Session) Output() []byte { return s.out }

// ClearOutput records that the driver has taken the output.
func (s *Session) ClearOutput() {
	s.out = s.out[:0]
	s.release(busyOutput)
}

// release frees an empty output buffer larger than most bytes.
func (s *Session) release(limit int) {
	if len(s.out) == 0 && cap(s.out) > limit {
		s.out = nil
	}
}

// Closing reports whether to close the connection after writing the output, and the cause: a
// *wire.Error that is in the output, or ErrSilent.
func (s *Session) Closing() (closing bool, cause error) { return s.closing, s.cause }

// Deadline returns when to call Tick, or mono.Never. Only Tick and OpIdentify can make the deadline
// earlier. So the driver may set its timer after these only; then the timer is at worst too early,
// which is harmless.
func (s *Session) Deadline() mono.Time {
	interval := s.identity.HeartbeatInterval
	if s.closing || interval == 0 {
		return mono.Never
	}
	return min(s.nextHeartbeat, s.lastHeard.Add(2*interval))
}

// Tick adds a heartbeat to the output if one is due at now. It starts to close if the client was
// silent for two intervals. Before the magic it sends no heartbeat, because the client may not
// speak our protocol.
//
// A late Tick extends the client's time by its delay: a server that was stopped for a minute must
// not close clients whose commands wait in the socket.
func (s *Session) Tick(now mono.Time) {
	interval := s.identity.HeartbeatInterval
	due := s.Deadline()
	if s.closing || interval == 0 || now.Before(due) {
		return
	}
	s.lastHeard = min(now, s.lastHeard.Add(now.Sub(due)))
	if !now.Before(s.lastHeard.Add(2 * interval)) {
		s.closing, s.cause, s.need = true, ErrSilent, 0
		return
	}
	s.nextHeartbeat = now.Add(interval)
	s.release(idleOutput)
	if s.state != awaitMagic {
		s.out = wire.AppendResponse(s.out, wire.Heartbeat)
	}
}

// Heard records that the client is alive. It is for a driver that leaves a client's commands
// unread.
func (s *Session) Heard(now mono.Time) { s.lastHeard = max(s.lastHeard, now) }

// LastCommand returns the time of the last command, or of the connection's start. Late ticks move
// the time forward.
func (s *Session) LastCommand() mono.Time { return s.lastHeard }

// Identity returns the result of IDENTIFY, or the defaults before it.
func (s *Session) Identity() Identity { return s.identity }
