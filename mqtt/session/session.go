package session

import (
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/mqtt/names"
	nsq "github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
)

// Source is a broker subscription of the client: a channel of an SRTM topic.
type Source struct {
	Topic   string
	Channel string
	Number  uint16 // the driver's number of the source
}

// Outcome says what AppendMessage did with a message.
type Outcome uint8

// Outcomes of AppendMessage.
const (
	Unwanted Outcome = iota // nothing appended, the client does not want the message: the driver finishes it
	TooLarge                // nothing appended, larger than the client's maximum: the driver finishes it
	Blocked                 // nothing appended, the window is empty: the driver requeues the message
	SentOnce                // appended with QoS 0: the driver finishes the message
	Sent                    // appended with QoS 1: OpFin follows
)

// Session is a client's protocol state. Create it with New and do not copy it. Not safe for concurrent
// use.
type Session struct {
	need int
}

// New returns the session of a connection accepted at now. secure means that OpTLS is the first
// operation. Requires: cfg is valid and does not change while the session lives.
func New(cfg *Config, rules *names.Rules, secure bool, now mono.Time) *Session { return &Session{} }

// StepInto consumes at most one packet from the start of in, and returns the size n of the packet. The
// contract is the contract of nsq/session.StepInto. Requires: every earlier op has its Answer, except
// OpPub and OpFin, which may be answered later, in their order.
func (s *Session) StepInto(in []byte, now mono.Time, op *nsq.Op) (n int) { return 0 }

// Answer reports the outcome of an operation, and adds the packet that answers the operation, if any,
// to the output. Of an OpPub, Answer needs Kind and Packet only. Of an OpFin, Answer needs the Kind.
func (s *Session) Answer(op *nsq.Op, err error) {}

// AppendMessage appends the PUBLISH packet of a source's message to dst.
func (s *Session) AppendMessage(dst []byte, source *Source, m *wire.Message, attribute []byte) ([]byte, Outcome) {
	return dst, Unwanted
}

// Window returns how many QoS 1 messages may still be sent.
func (s *Session) Window() int { return 0 }

// Disconnect ends the session on behalf of the driver. A 5.0 client gets the reason.
func (s *Session) Disconnect(e *Error) {}

// UseRules replaces the rules, and the topics and channels of Subscriptions.
func (s *Session) UseRules(r *names.Rules) {}

// UseTime sets the wall time for the envelopes of the next Steps.
func (s *Session) UseTime(wall mono.Wall) {}

// Subscriptions returns the session's filters, to keep them or to compare them with the sources. The
// caller must not change the filters.
func (s *Session) Subscriptions() []nsq.Filter { return nil }

// Restore gives the session the filters of the kept session. Requires: OpConnect is not answered.
func (s *Session) Restore(kept []nsq.Filter) {}

// Needs reports whether any filter selects messages of the source.
func (s *Session) Needs(topic, channel string) bool { return false }

// Restricted reports whether the driver has yet to accept the CONNECT.
func (s *Session) Restricted() bool { return true }

// Version returns the protocol level: 4 (3.1.1) or 5, or 0 before CONNECT.
func (s *Session) Version() byte { return 0 }

// Need returns how many bytes in total the next Step needs to make progress. 0 means that no Step will
// make progress.
func (s *Session) Need() int { return s.need }

// Output returns the packets to write, oldest first. The session owns the slice, which is valid until
// the next call of any other method.
func (s *Session) Output() []byte { return nil }

// ClearOutput records that the driver has taken the output.
func (s *Session) ClearOutput() {}

// Closing reports whether to close the connection after writing the output, and the cause. The cause is
// nil after a DISCONNECT of the client.
func (s *Session) Closing() (closing bool, cause error) { return false, nil }

// Deadline returns when to call Tick, or mono.Never.
func (s *Session) Deadline() mono.Time { return mono.Never }

// Tick ends the session if the client was silent for 1.5 times its keep alive, or has not sent its
// CONNECT in time. A late Tick extends the client's time by its delay.
func (s *Session) Tick(now mono.Time) {}

// Heard records that the client is alive. It is for a driver that leaves a client's packets unread.
func (s *Session) Heard(now mono.Time) {}

// LastCommand returns the time of the last packet, or of the connection's start.
func (s *Session) LastCommand() mono.Time { return 0 }

// Identity returns the client's id and keep alive in the form of NSQ.
func (s *Session) Identity() nsq.Identity { return nsq.Identity{MsgTimeout: time.Minute} }
