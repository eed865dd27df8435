package table

import (
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Lend takes what a key's bucket holds from it, for somebody else to decide by (admission/
// lease), until Return. It reports false for a key that the shard does not have.
func (s *Shard) Lend(key []byte, now mono.Time) (contract tokenbucket.Share, credits tokenbucket.Tokens, ok bool) {
	i, ok := s.index[string(key)]
	if !ok {
		return tokenbucket.Share{}, 0, false
	}
	s.slot(i).flags |= lent
	return s.slot(i).bucket.Share(), s.empty(i, 0, now), true
}

// Return ends Lend.
func (s *Shard) Return(key string, credits tokenbucket.Tokens, now mono.Time) {
	if i, ok := s.index[key]; ok {
		s.slot(i).flags &^= lent
		s.empty(i, credits, now)
	}
}

// Contract returns what is to be divided of a key that is lent: nothing, unless its rule
// says so.
func (s *Shard) Contract(key string) tokenbucket.Share {
	if i, ok := s.index[key]; ok && s.slot(i).flags&leased != 0 {
		return s.slot(i).bucket.Share()
	}
	return tokenbucket.Share{}
}

// empty replaces what the bucket holds, which it returns.
func (s *Shard) empty(i int32, by tokenbucket.Tokens, now mono.Time) (held tokenbucket.Tokens) {
	e := s.slot(i)
	contract := e.bucket.Share()
	held = e.bucket.Retune(now, tokenbucket.Share{}, 0)
	e.bucket.Retune(now, contract, by)
	s.touch(i, e)
	return held
}
