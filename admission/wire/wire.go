package wire

import (
	"encoding/binary"
	"errors"
)

const (
	magic   = 0xAD
	version = 1

	headSize = 28
	macSize  = 16

	// MinQuestion, MaxQuestion and AnswerSize are lengths of datagrams in bytes.
	MinQuestion = headSize + macSize
	MaxQuestion = headSize + MaxKey + macSize
	AnswerSize  = headSize + macSize

	// MaxKey is the maximum length of a key in bytes.
	MaxKey = 256
)

// Kind says what a datagram is.
type Kind uint8

// The kinds.
const (
	Hello  Kind = 0 // wants a session
	Ask    Kind = 1 // may this key go on?
	Reply  Kind = 2 // to Ask: decided
	Issued Kind = 3 // to either: here is a session; ask again with it
	Moved  Kind = 4 // to Ask: another server owns the key, see the epoch
	Busy   Kind = 5 // to Ask: not decided; ask again later, or elsewhere
)

// Flags of a question.
const (
	Retry uint8 = 1 << iota // was sent before
	Peek                    // take nothing
)

// Flags of an answer.
const (
	Admit     uint8 = 1 << iota
	ByDefault       // by a default rule, or for want of any
	Shadow          // the rule would have denied
)

// Question is a datagram to a server.
type Question struct {
	Kind    Kind
	Flags   uint8
	Session uint64
	Number  uint64
	Cost    uint32
	Key     []byte // as parsed, a part of the datagram
}

// Answer is a datagram from a server.
type Answer struct {
	Kind    Kind
	Flags   uint8
	Session uint64
	Number  uint64
	Value   uint32 // milliseconds until a retry makes sense; if admitted, credits left; if Moved, CRC-32/IEEE of the owner's address
	Epoch   uint32 // if Moved: of the partition, grows with each change of its owner
}

// Errors of parsing. Whoever parses counts them, and answers nothing.
var (
	ErrMalformed = errors.New("malformed datagram")
	ErrMAC       = errors.New("wrong MAC, or a MAC key that is not known")
)

// AppendQuestion appends the datagram of q. Requires: len(q.Key) <= MaxKey.
func (s *Sealer) AppendQuestion(to []byte, q Question) []byte {
	from := len(to)
	to = append(to, magic, version, byte(q.Kind), q.Flags)
	to = binary.BigEndian.AppendUint64(to, q.Session)
	to = binary.BigEndian.AppendUint64(to, q.Number)
	to = binary.BigEndian.AppendUint32(to, q.Cost)
	to = binary.BigEndian.AppendUint16(to, s.id())
	to = binary.BigEndian.AppendUint16(to, uint16(len(q.Key)))
	to = append(to, q.Key...)
	return s.seal(to, from, s.id())
}

// ParseQuestion also returns the id of the MAC key, by which the answer is sealed.
// Errors: ErrMalformed, ErrMAC.
func (s *Sealer) ParseQuestion(d []byte) (q Question, keyID uint16, err error) {
	if len(d) < MinQuestion || len(d) > MaxQuestion || d[0] != magic || d[1] != version {
		return q, 0, ErrMalformed
	}
	keyID = binary.BigEndian.Uint16(d[24:])
	q = Question{
		Kind:    Kind(d[2]),
		Flags:   d[3],
		Session: binary.BigEndian.Uint64(d[4:]),
		Number:  binary.BigEndian.Uint64(d[12:]),
		Cost:    binary.BigEndian.Uint32(d[20:]),
		Key:     d[headSize : len(d)-macSize : len(d)-macSize],
	}
	if q.Kind > Ask || q.Flags&^(Retry|Peek) != 0 || int(binary.BigEndian.Uint16(d[26:])) != len(q.Key) ||
		(q.Kind == Ask) != (len(q.Key) > 0) {
		return Question{}, 0, ErrMalformed
	}
	if !s.genuine(d, keyID) {
		return Question{}, 0, ErrMAC
	}
	return q, keyID, nil
}

// AppendAnswer appends the datagram of a, sealed by the key that the question had.
func (s *Sealer) AppendAnswer(to []byte, a Answer, keyID uint16) []byte {
	from := len(to)
	to = append(to, magic, version, byte(a.Kind), a.Flags)
	to = binary.BigEndian.AppendUint64(to, a.Session)
	to = binary.BigEndian.AppendUint64(to, a.Number)
	to = binary.BigEndian.AppendUint32(to, a.Value)
	to = binary.BigEndian.AppendUint32(to, a.Epoch)
	return s.seal(to, from, keyID)
}

// ParseAnswer parses an answer to a question of this sealer's.
// Errors: ErrMalformed, ErrMAC.
func (s *Sealer) ParseAnswer(d []byte) (a Answer, err error) {
	if len(d) != AnswerSize || d[0] != magic || d[1] != version ||
		Kind(d[2]) < Reply || Kind(d[2]) > Busy || d[3]&^(Admit|ByDefault|Shadow) != 0 {
		return a, ErrMalformed
	}
	if !s.genuine(d, s.id()) {
		return a, ErrMAC
	}
	return Answer{
		Kind:    Kind(d[2]),
		Flags:   d[3],
		Session: binary.BigEndian.Uint64(d[4:]),
		Number:  binary.BigEndian.Uint64(d[12:]),
		Value:   binary.BigEndian.Uint32(d[20:]),
		Epoch:   binary.BigEndian.Uint32(d[24:]),
	}, nil
}
