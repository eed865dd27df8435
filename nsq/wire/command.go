package wire

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"time"
)

// Magic opens a V2 connection, before the first command.
const Magic = "  V2"

// MessageID identifies a message in flight: 16 hexadecimal digits in ASCII, chosen by the server.
// This package only copies it.
type MessageID [16]byte

// String returns the id in its wire format.
func (id MessageID) String() string { return string(id[:]) }

// sizeLength is the length of a size or count prefix: uint32, big endian.
const sizeLength = 4

// Verb is the verb of a command.
type Verb uint8

// The verbs of V2. The zero Verb is no command.
const (
	VerbNone Verb = iota
	VerbIdentify
	VerbAuth
	VerbPub
	VerbMpub
	VerbDpub
	VerbSub
	VerbRdy
	VerbFin
	VerbReq
	VerbTouch
	VerbNop
	VerbCls
	VerbPace // SRTM's own; requires Limits.Pace
)

// String returns the verb in its wire format, or "" for an undefined verb.
func (v Verb) String() string {
	if v > VerbPace {
		return ""
	}
	return [...]string{"", "IDENTIFY", "AUTH", "PUB", "MPUB", "DPUB", "SUB", "RDY", "FIN", "REQ", "TOUCH", "NOP", "CLS", "PACE"}[v]
}

// Command is one parsed command. Its slices are views into the parsed buffer and are valid while
// the caller keeps the buffer.
type Command struct {
	Verb    Verb
	Topic   []byte        // PUB, MPUB, DPUB, SUB; a valid name
	Channel []byte        // SUB; a valid name
	Body    []byte        // PUB, DPUB: the message; IDENTIFY: JSON; AUTH: the secret. Never empty for these verbs
	Batch   Batch         // MPUB
	Delay   time.Duration // DPUB: in [0, MaxDeferTimeout]; REQ: limited to [0, MaxReqTimeout]
	Ready   int           // RDY: in [0, MaxRdy]; PACE: the weight, in [1, 255]
	ID      MessageID     // FIN, REQ, TOUCH
}

// ParseMagic parses Magic at the start of in. It returns the number of bytes taken, 0 if in has
// fewer than 4 bytes, or E_BAD_PROTOCOL.
func ParseMagic(in []byte) (n int, err error) {
	if len(in) < len(Magic) {
		return 0, nil
	}
	if string(in[:len(Magic)]) != Magic {
		return 0, NewError(CodeBadProtocol, fmt.Sprintf("magic %q is not %q", in[:len(Magic)], Magic))
	}
	return len(Magic), nil
}

// Parse parses the command at the start of in into c, in place, and overwrites c.
//
// For a complete command, Parse returns its length n. Otherwise c is empty, n is 0, and need is the
// number of bytes in total that the next call requires; need is always more than len(in).
//
// Parse refuses an invalid command, with an *Error, as soon as the fault is visible: an invalid
// name before the body has arrived, a body that is too large after its 4 size bytes, a line that
// does not end within MaxLine. All such errors are fatal, because the start of the next command is
// unknown.
//
// For an incomplete command, walk keeps the progress for the next call, whose in must begin with
// the same bytes. Otherwise walk is empty.
//
//	verb [' ' argument]... ['\r'] '\n'     every command, at most MaxLine bytes
//
//	|  line  | [x][x][x][x] | ...          IDENTIFY, AUTH, PUB, DPUB, MPUB
//	|        |   (uint32)   ||  N bytes
//	            size N          body
//
// Arguments are separated by exactly one space. Additional arguments are ignored. Numbers are
// decimal.
func (c *Command) Parse(in []byte, lim *Limits, walk *Walk) (n, need int, err error) {
	*c = Command{}
	n, need, fault := c.parse(in, lim, walk)
	if fault != nil {
		*c, *walk = Command{}, Walk{}
		return 0, 0, fault
	}
	if n == 0 {
		*c = Command{}
		return 0, need, nil
	}
	*walk = Walk{}
	return n, 0, nil
}

// finLength is the length of FIN in its usual form, in bytes.
const finLength = len("FIN ") + len(MessageID{}) + len("\n")

func (c *Command) parse(in []byte, lim *Limits, walk *Walk) (n, need int, fault *Error) {
	// PUB and FIN in their usual form are most of a broker's commands. They need no search for
	// arguments.
	if len(in) >= finLength && string(in[:4]) == "FIN " && in[finLength-1] == '\n' && visible(in[4:12]) && visible(in[12:20]) {
		c.Verb = VerbFin
		copy(c.ID[:], in[4:])
		return finLength, 0, nil
	}
	eol := bytes.IndexByte(in[:min(len(in), MaxLine)], '\n')
	if eol < 0 {
		if len(in) >= MaxLine {
			return 0, 0, invalid("command line does not end within %d bytes", MaxLine)
		}
		return 0, len(in) + 1, nil
	}
	line := in[:eol]
	if eol > 0 && line[eol-1] == '\r' {
		line = line[:eol-1]
	}
	at := eol + 1 // start of the body or of the next command
	if len(line) > 4 && string(line[:4]) == "PUB " && ValidTopicName(line[4:]) {
		c.Verb, c.Topic = VerbPub, line[4:]
		return c.parseMessageBody(in, at, lim)
	}
	args := arguments{rest: line, more: true}
	verb := args.next()

	// In the order of their frequency on a broker.
	switch string(verb) {
	case "PUB":
		c.Verb = VerbPub
		c.Topic = args.next()
		if fault = args.done(c.Verb); fault != nil {
			return 0, 0, fault
		}
		return c.parseMessage(in, at, lim)
	case "FIN":
		c.Verb = VerbFin
		return at, 0, c.parseID(&args)
	case "RDY":
		c.Verb = VerbRdy
		return at, 0, c.parseReady(&args, lim.MaxRdy)
	case "MPUB":
		c.Verb = VerbMpub
		c.Topic = args.next()
		if fault = args.done(c.Verb); fault != nil {
			return 0, 0, fault
		}
		return c.parseBatch(in, at, lim, walk)
	case "NOP":
		c.Verb = VerbNop
		return at, 0, nil
	case "DPUB":
		c.Verb = VerbDpub
		return c.parseDpub(in, at, &args, lim)
	case "REQ":
		c.Verb = VerbReq
		return at, 0, c.parseReq(&args, lim.MaxReqTimeout)
	case "TOUCH":
		c.Verb = VerbTouch
		return at, 0, c.parseID(&args)
	case "SUB":
		c.Verb = VerbSub
		return at, 0, c.parseSub(&args)
	case "IDENTIFY", "AUTH":
		c.Verb = VerbIdentify
		if verb[0] == 'A' {
			c.Verb = VerbAuth
		}
		c.Body, n, need, fault = parseBody(in, at, min(lim.MaxBodySize, MaxIdentityBody), c.Verb, CodeBadBody)
		return n, need, fault
	case "CLS":
		c.Verb = VerbCls
		return at, 0, nil
	case "PACE":
		if lim.Pace {
			c.Verb = VerbPace
			return at, 0, c.parsePace(&args)
		}
	}
	return 0, 0, invalid("unknown command %q", verb)
}

// visible reports whether each of the first 8 bytes of b is in ['!', 0x7f]. It looks at all bytes at
// once: a byte below '!' borrows, which sets its highest bit.
func visible(b []byte) bool {
	x := binary.BigEndian.Uint64(b)
	return (x|(x-0x2121212121212121))&0x8080808080808080 == 0
}

// PeekVerb returns the verb of the command at the start of in as soon as the line is complete, even
// if the command is incomplete or invalid. It returns VerbNone before the end of the line, for an
// unknown verb, and for PACE. With PeekVerb a server can refuse a command before the body arrives.
func PeekVerb(in []byte) Verb {
	eol := bytes.IndexByte(in[:min(len(in), MaxLine)], '\n')
	if eol < 0 {
		return VerbNone
	}
	args := arguments{rest: bytes.TrimSuffix(in[:eol], []byte{'\r'}), more: true}
	verb := args.next()
	for v := VerbIdentify; v <= VerbCls; v++ {
		if v.String() == string(verb) {
			return v
		}
	}
	return VerbNone
}

// arguments iterates over the space-separated arguments of a command line.
type arguments struct {
	rest []byte
	more bool // there is another argument, perhaps empty
	lack bool // next was called after the last argument
}

func (a *arguments) next() []byte {
	if !a.more {
		a.lack = true
		return nil
	}
	arg := a.rest
	if i := bytes.IndexByte(a.rest, ' '); i >= 0 {
		arg, a.rest = a.rest[:i], a.rest[i+1:]
	} else {
		a.more = false
	}
	return arg
}

// done refuses a line with too few arguments. Additional arguments are ignored, as in NSQ: SUB once
// had four arguments, and old clients still send them.
func (a *arguments) done(v Verb) *Error {
	if a.lack {
		return invalid("%s has too few parameters", v)
	}
	return nil
}

func (c *Command) parseMessage(in []byte, at int, lim *Limits) (n, need int, fault *Error) {
	if fault = badTopic(c.Verb, c.Topic); fault != nil {
		return 0, 0, fault
	}
	return c.parseMessageBody(in, at, lim)
}

func (c *Command) parseMessageBody(in []byte, at int, lim *Limits) (n, need int, fault *Error) {
	if c.Body, n, need, fault = parseBody(in, at, lim.maxBody(), c.Verb, CodeBadMessage); n > 0 {
		fault = lim.checkAttribute(c.Verb, c.Body)
	}
	return n, need, fault
}

func (c *Command) parseDpub(in []byte, at int, args *arguments, lim *Limits) (n, need int, fault *Error) {
	c.Topic = args.next()
	delay := args.next()
	if fault = args.done(c.Verb); fault != nil {
		return 0, 0, fault
	}
	// Unlike the delay of REQ, an excessive delay is refused: a message published at the wrong
	// future time is worse than a refused message. The documentation's limit is exclusive. Ours is
	// inclusive, as in the flag's text.
	ms, ok := parseInt(delay)
	if limit := int64(lim.MaxDefer() / time.Millisecond); !ok || ms < 0 || ms > limit {
		return 0, 0, invalid("DPUB defer time %q is not a number of milliseconds in [0, %d]", delay, limit)
	}
	c.Delay = time.Duration(ms) * time.Millisecond
	return c.parseMessage(in, at, lim)
}

func (c *Command) parseSub(args *arguments) *Error {
	c.Topic = args.next()
	c.Channel = args.next()
	if fault := args.done(c.Verb); fault != nil {
		return fault
	}
	if fault := badTopic(c.Verb, c.Topic); fault != nil {
		return fault
	}
	if !ValidChannelName(c.Channel) {
		return NewError(CodeBadChannel, fmt.Sprintf("SUB channel name %q is not valid", c.Channel))
	}
	return nil
}

func (c *Command) parseID(args *arguments) *Error {
	id := args.next()
	if fault := args.done(c.Verb); fault != nil {
		return fault
	}
	return c.setID(id)
}

func (c *Command) setID(id []byte) *Error {
	if len(id) != len(c.ID) {
		return invalid("%s message id %q is not %d bytes", c.Verb, id, len(c.ID))
	}
	copy(c.ID[:], id)
	return nil
}

// parseReq limits the delay to [0, limit] instead of refusing it. A client library that doubles its
// delay exceeds the limit sooner or later, and closing its connection would requeue all its
// messages in flight.
func (c *Command) parseReq(args *arguments, limit time.Duration) *Error {
	id := args.next()
	delay := args.next()
	if fault := args.done(c.Verb); fault != nil {
		return fault
	}
	if fault := c.setID(id); fault != nil {
		return fault
	}
	ms, ok := parseInt(delay)
	if !ok {
		return invalid("REQ timeout %q is not a number of milliseconds", delay)
	}
	ms = min(max(ms, 0), int64(limit/time.Millisecond))
	c.Delay = time.Duration(ms) * time.Millisecond
	return nil
}

// parseReady also accepts 0, although the documentation starts at 1: client libraries pause with 0.
// A missing count means 1, as in NSQ.
func (c *Command) parseReady(args *arguments, limit int) *Error {
	count := args.next()
	if args.lack {
		count = []byte{'1'}
	}
	n, ok := parseInt(count)
	if !ok || n < 0 || n > int64(limit) {
		return invalid("RDY count %q is not a number in [0, %d]", count, limit)
	}
	c.Ready = int(n)
	return nil
}

// parsePace accepts version 1 only.
func (c *Command) parsePace(args *arguments) *Error {
	version, weight := args.next(), args.next()
	if fault := args.done(c.Verb); fault != nil {
		return fault
	}
	if string(version) != "1" {
		return invalid("PACE version %q is not 1", version)
	}
	n, ok := parseInt(weight)
	if !ok || n < 1 || n > math.MaxUint8 {
		return invalid("PACE weight %q is not a number in [1, %d]", weight, math.MaxUint8)
	}
	c.Ready = int(n)
	return nil
}

// parseBody finds the sized body at in[at:]. A size outside [1, limit] is refused before the body
// arrives.
func parseBody(in []byte, at, limit int, v Verb, code ErrorCode) (body []byte, n, need int, fault *Error) {
	size, need, fault := parseSize(in, at, limit, v, code)
	if fault != nil || need > 0 {
		return nil, 0, need, fault
	}
	start := at + sizeLength
	end := start + size
	if len(in) < end {
		return nil, 0, end, nil
	}
	return in[start:end:end], end, 0, nil
}

func parseSize(in []byte, at, limit int, v Verb, code ErrorCode) (size, need int, fault *Error) {
	if len(in) < at+sizeLength {
		return 0, at + sizeLength, nil
	}
	n := binary.BigEndian.Uint32(in[at:])
	if n == 0 || int64(n) > int64(limit) {
		return 0, 0, NewError(code, fmt.Sprintf("%s body of %d bytes is outside [1, %d]", v, n, limit))
	}
	return int(n), 0, nil
}

func badTopic(v Verb, name []byte) *Error {
	if ValidTopicName(name) {
		return nil
	}
	return NewError(CodeBadTopic, fmt.Sprintf("%s topic name %q is not valid", v, name))
}

func invalid(format string, args ...any) *Error {
	return NewError(CodeInvalid, fmt.Sprintf(format, args...))
}

// maxDigits keeps every accepted number within int64.
const maxDigits = 18

// parseInt parses an optional minus sign and 1 to 18 decimal digits.
func parseInt[T ~string | ~[]byte](s T) (v int64, ok bool) {
	i := 0
	neg := len(s) > 0 && s[0] == '-'
	if neg {
		i = 1
	}
	if len(s) == i || len(s)-i > maxDigits {
		return 0, false
	}
	for ; i < len(s); i++ {
		d := s[i] - '0'
		if d > 9 {
			return 0, false
		}
		v = v*10 + int64(d)
	}
	if neg {
		v = -v
	}
	return v, true
}
