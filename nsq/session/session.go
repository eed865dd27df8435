package session

import (
	"errors"
	"fmt"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/origin"
	"github.com/srtm-io/srtm/nsq/wire"
)

// ErrSilent is the cause of a close for want of any command during two
// heartbeat intervals. No frame is sent for it.
var ErrSilent = errors.New("client sent no command for two heartbeat intervals")

// A server holds thousands of idle sessions and a few busy ones. What a busy
// one grew its output to is kept between bursts up to busyOutput, so that
// replies cost no allocation (400 of them between two ClearOutput), and given
// back at the next heartbeat down to idleOutput.
const (
	busyOutput = 4 << 10 // bytes
	idleOutput = 256     // bytes
)

type state uint8

const (
	awaitMagic  state = iota // nothing but the magic
	connected                // magic seen
	subscribed               // SUB seen
	closingWait              // CLS seen
)

// Session is a client's state. New makes one; it must not be copied. Not safe
// for concurrent use.
type Session struct {
	// Set once.
	cfg *Config

	// What the client may do now.
	state      state
	authorised bool // AUTH succeeded
	closing    bool // no further Step, Done or Tick has an effect on the client
	identity   Identity
	upgrades   [2]OpKind // granted and not given out yet, OpNone last
	encrypted  bool      // OpTLS was carried out
	wrapped    bool      // an upgrade was carried out

	// Operations given out and not yet Done. Publishes and FINs may pile up;
	// anything else is the last, since the meaning of the next command depends on
	// it. Invariant: barrier implies outstanding > 0.
	outstanding int32
	barrier     bool // the last one is neither

	need  int         // bytes the next Step needs
	seen  wire.Walk   // of the command that has not come whole
	heard mono.Time   // when the last command came, moved by late ticks
	beat  mono.Time   // when the next heartbeat is due, if there are any
	fault *wire.Error // refused, and to be sent when outstanding is 0
	cause error       // why closing

	out []byte // frames the driver has not taken
}

// New returns the session of a connection accepted at now. cfg must be valid,
// and stay as it is while the session lives.
func New(cfg *Config, now mono.Time) *Session {
	return &Session{
		cfg:      cfg,
		identity: defaultIdentity(cfg),
		need:     len(wire.Magic),
		heard:    now,
		beat:     now.Add(cfg.HeartbeatInterval),
	}
}

// Step consumes at most one command from the start of in, or the magic when
// nothing was consumed before, and returns how many bytes that were.
//
// An op other than OpNone is to be carried out and answered with Done; an
// upgrade comes with n == 0. OpNone with n > 0 needed nothing from the driver.
// OpNone with n == 0 needs more bytes, Need in total; or the session is
// closing, which Closing tells. A command that is refused is not consumed and
// nothing of it is returned.
//
// Requires: every op before this one is Done, except that OpPub, OpMpub, OpDpub
// and OpFin may wait, to be Done later in the order they were given out.
func (s *Session) Step(in []byte, now mono.Time) (n int, op Op) {
	n = s.StepInto(in, now, &op)
	return n, op
}

// StepInto is Step for a driver that keeps the Op where it is: copies of it are
// a good part of what a short command costs. What op was before is forgotten.
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
	n, need, err := cmd.Parse(in, &s.cfg.Limits, &s.seen)
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
	s.heard = now
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

// stepUpgrade gives out the next upgrade. What the client sent before it was
// answered is in the old wrapping and would be read in the new one.
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
		s.heard = now
		s.need = 1
	}
	return n
}

// Restricted reports whether the client has yet to do what the server requires
// of all: until then most commands are refused by their verb, before a body is
// waited for that a client could send.
func (s *Session) Restricted() bool {
	return s.cfg.TLSRequired && !s.encrypted || s.cfg.AuthRequired && !s.authorised
}

// barred returns why the verb is refused to a client that is restricted.
func (s *Session) barred(v wire.Verb) *wire.Error {
	switch v {
	case wire.VerbNone, wire.VerbIdentify: // what is no command is refused for that
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

// admit applies the rules of the state to a well-formed command: it fills op
// and moves the state, or refuses and changes nothing.
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
				// A consumer that vanishes would keep its messages for good.
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
			// A client may still turn its RDY down while it waits for the end.
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
		case s.wrapped: // what would it upgrade, and from what?
			return notNow(cmd.Verb, "after an upgrade")
		}
		id, fault := negotiate(s.cfg, cmd.Body)
		if fault != nil {
			return fault
		}
		s.identity = id
		s.beat = now.Add(id.HeartbeatInterval)
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

// ErrClosedUnsubscribed is the cause of the refusal of CLS from a client that does not subscribe.
// Some client libraries send CLS whenever they close, also as producers.
var ErrClosedUnsubscribed = errors.New("CLS of a client that does not subscribe")

func notNow(v wire.Verb, when string) *wire.Error {
	return wire.NewError(wire.CodeInvalid, v.String()+" "+when)
}

// Done tells the outcome of an operation that Step gave out, and puts the
// reply, if its command has one, into the output. A *wire.Error in err is sent
// as it is; any other error is sent as the operation's own failure code, with
// err as the cause that stays here. After a failed upgrade only a *wire.Error
// is sent: what the client could still read, only the driver knows.
func (s *Session) Done(op Op, err error) { s.Answer(&op, err) }

// Answer is Done for a driver that keeps the Op where it is.
func (s *Session) Answer(op *Op, err error) {
	if op.Kind == OpNone || s.outstanding == 0 {
		panic(fmt.Sprintf("session: Done of %v with %d operations outstanding", op.Kind, s.outstanding))
	}
	s.outstanding--
	s.barrier = s.barrier && s.outstanding > 0
	if s.closing {
		return // an earlier one in the queue ended the conversation
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
		verb, code := op.Kind.about()
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
		s.state = connected // nothing was subscribed, the client may try again
	}
}

// Refuse ends the conversation with e, for a driver that can go on no longer.
func (s *Session) Refuse(e *wire.Error) {
	if !s.closing {
		s.refuse(e)
	}
}

// refuse ends the conversation with err, after the replies that come before.
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

// wireError finds the *wire.Error in err, or returns nil. A bare one, which is
// what a full topic answers with to every message, is found without the
// allocation that errors.As costs.
func wireError(err error) *wire.Error {
	if e, ok := err.(*wire.Error); ok {
		return e
	}
	var e *wire.Error
	errors.As(err, &e)
	return e
}

// Need returns how many bytes in total the next Step needs to get further, and
// 0 when no Step will. Never more than the MaxCommandSize of the limits.
func (s *Session) Need() int { return s.need }

// Output returns the frames to write, oldest first. They stay the session's:
// they hold until the next call of any other method. A driver that does not
// write them must not read on, or they pile up here.
func (s *Session) Output() []byte { return s.out }

// ClearOutput says that the output was taken.
func (s *Session) ClearOutput() {
	s.out = s.out[:0]
	s.release(busyOutput)
}

// release gives an empty output back if it holds more than most bytes.
func (s *Session) release(most int) {
	if len(s.out) == 0 && cap(s.out) > most {
		s.out = nil
	}
}

// Closing reports whether to close the connection once the output is written,
// and why: a *wire.Error that was also sent, or ErrSilent.
func (s *Session) Closing() (closing bool, cause error) { return s.closing, s.cause }

// Deadline returns when to call Tick, or mono.Never. Only Tick and an
// OpIdentify can make it earlier, so a timer that is set after these alone is
// at worst too early, which Tick takes well.
func (s *Session) Deadline() mono.Time {
	interval := s.identity.HeartbeatInterval
	if s.closing || interval == 0 {
		return mono.Never
	}
	return min(s.beat, s.heard.Add(2*interval))
}

// Tick puts a heartbeat into the output if one is due at now, or starts
// closing if the client was silent for two intervals. Before the magic no
// heartbeat is sent: the client has not said that it speaks our protocol.
//
// A Tick that comes late moves the end of the client's time by as much: a
// server that was stopped for a minute must not hold its own pause against
// clients whose commands wait in the socket.
func (s *Session) Tick(now mono.Time) {
	interval := s.identity.HeartbeatInterval
	due := s.Deadline()
	if s.closing || interval == 0 || now.Before(due) {
		return
	}
	s.heard = min(now, s.heard.Add(now.Sub(due)))
	if !now.Before(s.heard.Add(2 * interval)) {
		s.closing, s.cause, s.need = true, ErrSilent, 0
		return
	}
	s.beat = now.Add(interval)
	s.release(idleOutput)
	if s.state != awaitMagic {
		s.out = wire.AppendResponse(s.out, wire.Heartbeat)
	}
}

// Heard says that the client is there though nothing of it was stepped: for a
// driver that lets what it says wait unread, which is not the client's silence.
func (s *Session) Heard(now mono.Time) { s.heard = max(s.heard, now) }

// LastCommand returns when the last command came, or the connection began. Late ticks move
// the time forward.
func (s *Session) LastCommand() mono.Time { return s.heard }

// Identity returns what IDENTIFY negotiated, or the defaults before it.
func (s *Session) Identity() Identity { return s.identity }
