package wire

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"math"

	"github.com/srtm-io/srtm/tokenbucket"
)

const (
	magic   = 0xAD
	version = 2

	headSize = 32
	macSize  = 16

	heldSize    = 40
	grantedSize = 32

	// MinQuestion, MaxQuestion, AnswerSize and GrantSize are lengths of datagrams in
	// bytes.
	MinQuestion = headSize + macSize
	MaxQuestion = headSize + MaxKey + heldSize + macSize
	AnswerSize  = headSize + macSize
	GrantSize   = headSize + grantedSize + macSize

	// MaxKey is the maximum length of a key in bytes.
	MaxKey = 256
)

// Kind says what a datagram is.
type Kind uint8

// The kinds.
const (
	Hello   Kind = 0 // wants a session
	Ask     Kind = 1 // may this key go on?
	Reply   Kind = 2 // to Ask: decided; to Lease: nothing is granted, decided as by Ask with Peek
	Issued  Kind = 3 // to any: here is a session; ask again with it
	Moved   Kind = 4 // to Ask and Lease: another server owns the key, see the epoch
	Busy    Kind = 5 // to the same: not decided; ask again later, or elsewhere
	Lease   Kind = 6 // which share of this key may I hold? Cost: credits wanted since the last one
	Granted Kind = 7 // to Lease: this one, see Grant
	Waiting Kind = 8 // to Ask: the server looks the key up; the question is decided within its wait
	Cancel  Kind = 9 // the asker has denied the question of this number: do not charge it, or give its cost back
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
	Shadow          // the rule would have denied; of Granted: it admits whatever is held
	Leased          // the rule has holders decide: ask by Lease
	FailOpen        // a client that holds nothing and reaches no server admits
	Never           // of a denial: the bucket will not have the cost at any time
)

// Question is a datagram to a server.
type Question struct {
	Kind    Kind
	Flags   uint8
	Session uint64
	Number  uint64
	Cost    uint32
	Wait    uint32 // of Ask: for how long from now an answer is of use, milliseconds
	Key     []byte // as parsed, a part of the datagram
	Held    Held   // of Lease
}

// Held is what a holder says of itself.
type Held struct {
	Holder   uint64 // drawn at random by each
	Epoch    uint64 // of the newest grant; 0: none
	Share    tokenbucket.Share
	Released tokenbucket.Tokens // that did not fit into that grant
}

// Answer is a datagram from a server.
type Answer struct {
	Kind    Kind
	Flags   uint8
	Session uint64
	Number  uint64
	Value   uint32 // of Reply: credits left; of Granted: milliseconds; of Moved: HashOf the owner
	Wait    uint64 // of Reply: milliseconds until the bucket is full, or if denied and not Never until it has the cost
	Epoch   uint32 // of Moved: the partition's, which grows with each change of its owner
}

// HashOf is CRC-32/IEEE of a server's address, by which Moved names the owner.
func HashOf(address string) uint32 { return crc32.ChecksumIEEE([]byte(address)) }

// Grant is what a holder may use, for as long as Answer.Value says, in milliseconds, after it
// asked. What is not of an epoch above that of Held is what it holds.
type Grant struct {
	Epoch  uint64
	Share  tokenbucket.Share
	Tokens tokenbucket.Tokens // beyond those that it has
}

// Errors of parsing. The caller counts them, and answers nothing.
var (
	ErrMalformed = errors.New("malformed datagram")
	ErrMAC       = errors.New("wrong MAC, or a MAC key that is not known")
)

// AppendQuestion appends the datagram of q. Requires: len(q.Key) <= MaxKey.
func (s *Sealer) AppendQuestion(to []byte, q Question) []byte {
	from := len(to)
	to = appendHead(to, head{q.Kind, q.Flags, q.Session, q.Number, q.Cost, uint64(q.Wait)<<32 | uint64(s.id())<<16 | uint64(len(q.Key))})
	to = append(to, q.Key...)
	if h := &q.Held; q.Kind == Lease {
		to = appendShare(binary.BigEndian.AppendUint64(to, h.Holder), h.Epoch, h.Share, h.Released)
	}
	return s.seal(to, from, s.id())
}

// ParseQuestion also returns the id of the MAC key, by which the answer is sealed.
// Errors: ErrMalformed, ErrMAC.
func (s *Sealer) ParseQuestion(d []byte) (q Question, keyID uint16, err error) {
	if len(d) < MinQuestion || len(d) > MaxQuestion || d[0] != magic || d[1] != version {
		return q, 0, ErrMalformed
	}
	h := parseHead(d)
	keyID = uint16(h.last >> 16)
	n := int(uint16(h.last))
	q = Question{Kind: h.kind, Flags: h.flags, Session: h.session, Number: h.number, Cost: h.value, Wait: uint32(h.last >> 32)}
	held := 0
	if q.Kind == Lease {
		held = heldSize
	}
	if q.Kind > Ask && q.Kind != Lease && q.Kind != Cancel || q.Flags&^(Retry|Peek) != 0 || headSize+n+held+macSize != len(d) ||
		n > MaxKey || (q.Kind == Hello) != (n == 0) {
		return Question{}, 0, ErrMalformed
	}
	q.Key = d[headSize : headSize+n : headSize+n]
	if q.Kind == Lease {
		at := d[headSize+n:]
		q.Held.Holder = binary.BigEndian.Uint64(at)
		q.Held.Epoch, q.Held.Share, q.Held.Released = share(at[8:])
	}
	if !s.genuine(d, keyID) {
		return Question{}, 0, ErrMAC
	}
	return q, keyID, nil
}

// AppendAnswer appends the datagram of a, sealed by the key that the question had.
func (s *Sealer) AppendAnswer(to []byte, a Answer, keyID uint16) []byte {
	from := len(to)
	return s.seal(appendHead(to, a.head()), from, keyID)
}

// AppendGrant is AppendAnswer of a Granted.
func (s *Sealer) AppendGrant(to []byte, a Answer, g Grant, keyID uint16) []byte {
	from := len(to)
	return s.seal(appendShare(appendHead(to, a.head()), g.Epoch, g.Share, g.Tokens), from, keyID)
}

// head is how each datagram begins. The last 8 bytes of a question's are its Wait, the id of its
// MAC key and the length of its key; of an answer's, its Wait or its Epoch.
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

func appendShare(to []byte, epoch uint64, share tokenbucket.Share, tokens tokenbucket.Tokens) []byte {
	to = binary.BigEndian.AppendUint64(to, epoch)
	to = binary.BigEndian.AppendUint64(to, uint64(share.Rate))
	to = binary.BigEndian.AppendUint64(to, uint64(share.Burst))
	return binary.BigEndian.AppendUint64(to, uint64(tokens))
}

func share(d []byte) (epoch uint64, share tokenbucket.Share, tokens tokenbucket.Tokens) {
	return binary.BigEndian.Uint64(d),
		tokenbucket.Share{Rate: tokenbucket.Rate(binary.BigEndian.Uint64(d[8:])), Burst: int64(binary.BigEndian.Uint64(d[16:]))},
		tokenbucket.Tokens(binary.BigEndian.Uint64(d[24:]))
}

// ParseAnswer parses an answer to a question of this sealer's, and of a Granted the grant.
// Errors: ErrMalformed, ErrMAC.
func (s *Sealer) ParseAnswer(d []byte) (a Answer, g Grant, err error) {
	if len(d) < AnswerSize || d[0] != magic || d[1] != version || d[3]&^(Admit|ByDefault|Shadow|Leased|FailOpen|Never) != 0 {
		return a, g, ErrMalformed
	}
	switch kind := Kind(d[2]); {
	case len(d) == AnswerSize && (kind >= Reply && kind <= Busy || kind == Waiting), len(d) == GrantSize && kind == Granted:
	default:
		return a, g, ErrMalformed
	}
	if !s.genuine(d, s.id()) {
		return a, g, ErrMAC
	}
	if len(d) == GrantSize {
		g.Epoch, g.Share, g.Tokens = share(d[headSize:])
	}
	h := parseHead(d)
	a = Answer{Kind: h.kind, Flags: h.flags, Session: h.session, Number: h.number, Value: h.value}
	if a.Kind == Moved {
		if h.last > math.MaxUint32 {
			return Answer{}, Grant{}, ErrMalformed
		}
		a.Epoch = uint32(h.last)
	} else {
		a.Wait = h.last
	}
	return a, g, nil
}
