package table

import (
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Lend takes what a key's bucket holds, and earns until Return, from it, for another to decide
// by (admission/lease). It reports false for a key that the shard does not have.
func (s *Shard) Lend(key []byte, now mono.Time) (contract tokenbucket.Share, credits tokenbucket.Tokens, ok bool) {
	_, i, ok := find(s, key)
	if !ok {
		return tokenbucket.Share{}, 0, false
	}
	s.slot(i).flags |= lent
	return s.slot(i).share(), s.empty(i, 0, now), true
}

// Denied counts a request for a key that is lent, which was denied.
func (s *Shard) Denied(key []byte) {
	if _, i, ok := find(s, key); ok {
		s.slot(i).deny()
	}
}

// Return ends Lend.
func (s *Shard) Return(key string, credits tokenbucket.Tokens, now mono.Time) {
	if _, i, ok := find(s, key); ok {
		s.slot(i).flags &^= lent
		s.empty(i, tokenbucket.Tokens(s.slot(i).scaled(int64(credits))), now)
	}
}

// Contract returns what is to be divided of a key that is lent: nothing, unless its rule
// says so.
func (s *Shard) Contract(key string) tokenbucket.Share {
	if _, i, ok := find(s, key); ok && s.slot(i).flags&leased != 0 {
		return s.slot(i).share()
	}
	return tokenbucket.Share{}
}

// empty replaces what the bucket holds, which it returns.
func (s *Shard) empty(i int32, by tokenbucket.Tokens, now mono.Time) (held tokenbucket.Tokens) {
	e := s.slot(i)
	b := e.bucket()
	held = b.Retune(now, tokenbucket.Share{}, 0)
	b.Retune(now, e.share(), by)
	e.setBucket(&b)
	s.touch(i)
	return held
}
