package wire

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"hash"
	"net/netip"
	"time"
)

// SessionLife is the minimum life of a session; the maximum is twice as long.
const SessionLife = time.Hour

// Sessions issues and checks sessions without storing them, like the cookies of RFC 9018: a session is
// an HMAC of the asker's address and the hour, with a secret of this start. So a session is valid for
// one address, expires by itself, and never outlives a restart. Sessions belongs to one goroutine.
type Sessions struct {
	hmac hash.Hash
	msg  [16 + 2 + 8]byte
	sum  [sha256.Size]byte
}

// NewSessions returns a Sessions with a secret that is drawn at each start and shared by all goroutines
// of a server.
func NewSessions(secret []byte) *Sessions {
	return &Sessions{hmac: hmac.New(sha256.New, secret)}
}

// Issue returns the session of an address. now is the wall clock.
func (s *Sessions) Issue(from netip.AddrPort, now time.Duration) uint64 {
	return s.sessionOf(from, hour(now))
}

// Valid reports whether the session was issued to the address in this hour or the previous hour.
func (s *Sessions) Valid(session uint64, from netip.AddrPort, now time.Duration) bool {
	return session == s.sessionOf(from, hour(now)) || session == s.sessionOf(from, hour(now)-1)
}

func hour(now time.Duration) uint64 { return uint64(now / SessionLife) }

func (s *Sessions) sessionOf(from netip.AddrPort, hour uint64) uint64 {
	a := from.Addr().As16()
	copy(s.msg[:], a[:])
	binary.BigEndian.PutUint16(s.msg[16:], from.Port())
	binary.BigEndian.PutUint64(s.msg[18:], hour)
	s.hmac.Reset()
	s.hmac.Write(s.msg[:])
	return binary.BigEndian.Uint64(s.hmac.Sum(s.sum[:0]))
}
