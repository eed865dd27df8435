package wire

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"math"
)

const (
	magic   = 0xAD
	version = 3

	headSize = 32
	macSize  = 16

	// MinQuestion, MaxQuestion and AnswerSize are lengths of datagrams in bytes.
	MinQuestion = headSize + macSize
	MaxQuestion = headSize + MaxKey + macSize
	AnswerSize  = headSize + macSize

	// MaxKey is the maximum length of a key in bytes.
	MaxKey = 256
)

// Kind is the kind of a datagram.
type Kind uint8

// The kinds.
const (
	Hello   Kind = 0 // requests a session
	Ask     Kind = 1 // asks whether to admit the key
	Reply   Kind = 2 // answers Ask: decided
	Issued  Kind = 3 // answers any kind: carries a session; ask again with it
	Moved   Kind = 4 // answers Ask: another server owns the key, see Epoch
	Busy    Kind = 5 // answers Ask: not decided; ask again later or elsewhere
	Waiting Kind = 6 // answers Ask: the server looks up the key and decides within the wait
	Cancel  Kind = 7 // the asker denied the question with this number: do not charge it, or give its cost back
)

// Flags of a question.
const (
	Retry uint8 = 1 << iota // sent before
	Peek                    // take no credits
)

// Flags of an answer.
const (
	Admit     uint8 = 1 << iota
	ByDefault       // a default rule, or no rule, applied
	Shadow          // the rule would have denied
	Never           // denied, and the bucket can never hold the cost
)

// Question is a datagram to a server.
type Question struct {
	Kind    Kind
	Flags   uint8
	Session uint64
	Number  uint64
	Cost    uint32
	Wait    uint32 // for Ask: milliseconds from now in which an answer is useful
	Key     []byte // parsed: a part of the datagram
}

// Answer is a datagram from a server.
type Answer struct {
	Kind    Kind
	Flags   uint8
	Session uint64
	Number  uint64
	Value   uint32 // in Reply: credits left; in Moved: HashOf the owner's address
	Wait    uint64 // in Reply: milliseconds until the bucket is full, or if denied without Never until it has the cost
	Epoch   uint32 // in Moved: the partition's epoch, which grows with each change of its owner
}

// HashOf returns CRC-32/IEEE of a server's address; Moved names the owner by this hash.
func HashOf(address string) uint32 { return crc32.ChecksumIEEE([]byte(address)) }

// Errors of parsing. The caller counts the error and sends no answer.
var (
	ErrMalformed = errors.New("malformed datagram")
	ErrMAC       = errors.New("wrong MAC, or a MAC key that is not known")
)

// AppendQuestion appends the datagram of q. Requires: len(q.Key) <= MaxKey.
func (s *Sealer) AppendQuestion(to []byte, q Question) []byte {
	from := len(to)
	to = appendHead(to, head{q.Kind, q.Flags, q.Session, q.Number, q.Cost, uint64(q.Wait)<<32 | uint64(s.id())<<16 | uint64(len(q.Key))})
	to = append(to, q.Key...)
	return s.seal(to, from, s.id())
}

// ParseQuestion parses a question and returns the id of its MAC key, which must seal the answer.
// Errors: ErrMalformed, ErrMAC.
func (s *Sealer) ParseQuestion(d []byte) (q Question, keyID uint16, err error) {
	if len(d) < MinQuestion || len(d) > MaxQuestion || d[0] != magic || d[1] != version {
		return q, 0, ErrMalformed
	}
	h := parseHead(d)
	keyID = uint16(h.last >> 16)
	n := int(uint16(h.last))
	q = Question{Kind: h.kind, Flags: h.flags, Session: h.session, Number: h.number, Cost: h.value, Wait: uint32(h.last >> 32)}
	if q.Kind > Ask && q.Kind != Cancel || q.Flags&^(Retry|Peek) != 0 || headSize+n+macSize != len(d) ||
		n > MaxKey || (q.Kind == Hello) != (n == 0) {
		return Question{}, 0, ErrMalformed
	}
	q.Key = d[headSize : headSize+n : headSize+n]
	if !s.genuine(d, keyID) {
		return Question{}, 0, ErrMAC
	}
	return q, keyID, nil
}

// AppendAnswer appends the datagram of a, sealed with the question's MAC key.
func (s *Sealer) AppendAnswer(to []byte, a Answer, keyID uint16) []byte {
	from := len(to)
	return s.seal(appendHead(to, a.head()), from, keyID)
}

// head is the start of each datagram. last holds a question's Wait, the id of its MAC key and the
// length of its key; or an answer's Wait or Epoch.
type head struct {
	kind            Kind
	flags           uint8
	session, number uint64
	value           uint32
	last            uint64
}

func (a *Answer) head() head {
	h := head{a.Kind, a.Flags, a.Session, a.Number, a.Value, a.Wait}
	if a.Kind == Moved {
		h.last = uint64(a.Epoch)
	}
	return h
}

func appendHead(to []byte, h head) []byte {
	to = append(to, magic, version, byte(h.kind), h.flags)
	to = binary.BigEndian.AppendUint64(to, h.session)
	to = binary.BigEndian.AppendUint64(to, h.number)
	to = binary.BigEndian.AppendUint32(to, h.value)
	return binary.BigEndian.AppendUint64(to, h.last)
}

func parseHead(d []byte) head {
	return head{
		kind:    Kind(d[2]),
		flags:   d[3],
		session: binary.BigEndian.Uint64(d[4:]),
		number:  binary.BigEndian.Uint64(d[12:]),
		value:   binary.BigEndian.Uint32(d[20:]),
		last:    binary.BigEndian.Uint64(d[24:]),
	}
}

// ParseAnswer parses an answer to a question of this Sealer. Errors: ErrMalformed, ErrMAC.
func (s *Sealer) ParseAnswer(d []byte) (a Answer, err error) {
	if len(d) != AnswerSize || d[0] != magic || d[1] != version || d[3]&^(Admit|ByDefault|Shadow|Never) != 0 ||
		Kind(d[2]) < Reply || Kind(d[2]) > Waiting {
		return a, ErrMalformed
	}
	if !s.genuine(d, s.id()) {
		return a, ErrMAC
	}
	h := parseHead(d)
	a = Answer{Kind: h.kind, Flags: h.flags, Session: h.session, Number: h.number, Value: h.value}
	if a.Kind == Moved {
		if h.last > math.MaxUint32 {
			return Answer{}, ErrMalformed
		}
		a.Epoch = uint32(h.last)
	} else {
		a.Wait = h.last
	}
	return a, nil
}
