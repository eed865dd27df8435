package table

import (
	"math/bits"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Credit returns the credits of a key. Requires: the shard has the key.
func (s *Shard) Credit(key string, now mono.Time) tokenbucket.Tokens {
	_, i, _ := find(s, key)
	return s.credit(s.slot(i), Now{Mono: now}).Credits
}

// Dirty is how many keys Changed has to return, or more.
func (s *Shard) Dirty() (n int) {
	for _, word := range s.changed[Saver] {
		n += bits.OnesCount64(word)
	}
	return n
}

// Collide lets several keys share a hash. Requires: s is empty.
func (s *Shard) Collide(hashes uint32) { s.hashes = hashes - 1 }

// Text returns how many bytes keys take, how many of these bytes are in use, and in how many arenas.
func (s *Shard) Text() (all, live, arenas int) {
	for a, text := range s.keys.arenas {
		all, live = all+len(text), live+int(s.keys.used[a])
	}
	return all, live, len(s.keys.arenas)
}
