package wire

import (
	"crypto/hmac"
	"crypto/sha256"
	"fmt"
	"hash"
)

// Key is a shared secret that authenticates datagrams.
type Key struct {
	ID     uint16
	Secret []byte // at least MinSecret bytes
}

// MinSecret is the minimum length of a secret in bytes.
const MinSecret = 16

// Sealer makes and checks MACs. It belongs to one goroutine. It allocates nothing after the first use
// of each key.
type Sealer struct {
	keys []sealing // the first key seals questions
	sum  [sha256.Size]byte
}

type sealing struct {
	id   uint16
	hmac hash.Hash
}

// NewSealer returns a Sealer for keys. Several keys are valid at once, so that keys can be replaced
// without a pause: add the new key everywhere, put the new key first everywhere, remove the old key.
// Without keys, datagrams are not authenticated.
func NewSealer(keys []Key) (*Sealer, error) {
	s := new(Sealer)
	for _, k := range keys {
		if len(k.Secret) < MinSecret {
			return nil, fmt.Errorf("MAC key %d has %d bytes: want at least %d", k.ID, len(k.Secret), MinSecret)
		}
		for _, other := range s.keys {
			if other.id == k.ID {
				return nil, fmt.Errorf("two MAC keys have the number %d", k.ID)
			}
		}
		s.keys = append(s.keys, sealing{k.ID, hmac.New(sha256.New, k.Secret)})
	}
	return s, nil
}

// id returns the id of the key that seals questions; 0 without keys.
func (s *Sealer) id() uint16 {
	if len(s.keys) == 0 {
		return 0
	}
	return s.keys[0].id
}

// mac returns the MAC of d, or nil if the key is unknown. The next call overwrites the result.
func (s *Sealer) mac(d []byte, id uint16) []byte {
	if len(s.keys) == 0 && id == 0 {
		clear(s.sum[:])
		return s.sum[:macSize]
	}
	for i := range s.keys {
		if k := &s.keys[i]; k.id == id {
			k.hmac.Reset()
			k.hmac.Write(d)
			return k.hmac.Sum(s.sum[:0])[:macSize]
		}
	}
	return nil
}

func (s *Sealer) seal(d []byte, from int, id uint16) []byte {
	return append(d, s.mac(d[from:], id)...)
}

func (s *Sealer) genuine(d []byte, id uint16) bool {
	m := s.mac(d[:len(d)-macSize], id)
	return m != nil && hmac.Equal(m, d[len(d)-macSize:])
}
