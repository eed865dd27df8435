package tokenbucket

import (
	"math"
	"math/bits"
)

// int128 is a signed integer in two's complement. An exact bucket needs the product of a rate and a
// time (up to 2^103). Bucket explains why nothing overflows.
type int128 struct {
	hi int64
	lo uint64
}

func from64(x int64) int128 { return int128{hi: x >> 63, lo: uint64(x)} }

// mul returns x * y. Requires: y >= 0.
func mul(x, y int64) int128 {
	hi, lo := bits.Mul64(uint64(x), uint64(y))
	if x < 0 {
		hi -= uint64(y) // uint64(x) is x + 2^64
	}
	return int128{hi: int64(hi), lo: lo}
}

func (a int128) add(b int128) int128 {
	lo, carry := bits.Add64(a.lo, b.lo, 0)
	hi, _ := bits.Add64(uint64(a.hi), uint64(b.hi), carry)
	return int128{hi: int64(hi), lo: lo}
}

func (a int128) sub(b int128) int128 {
	lo, borrow := bits.Sub64(a.lo, b.lo, 0)
	hi, _ := bits.Sub64(uint64(a.hi), uint64(b.hi), borrow)
	return int128{hi: int64(hi), lo: lo}
}

func (a int128) less(b int128) bool {
	return a.hi < b.hi || a.hi == b.hi && a.lo < b.lo
}

func (a int128) sign() int {
	switch {
	case a.hi < 0:
		return -1
	case a.hi == 0 && a.lo == 0:
		return 0
	}
	return 1
}

// floorDiv returns a / d rounded down, limited to the range of int64. Requires: d > 0.
func (a int128) floorDiv(d int64) int64 {
	if a.hi < 0 {
		// floor(a/d) == -1 - floor((-1-a)/d), and -1-a is ^a.
		return -1 - int128{hi: ^a.hi, lo: ^a.lo}.floorDiv(d)
	}
	if uint64(a.hi) >= uint64(d) {
		return math.MaxInt64
	}
	q, _ := bits.Div64(uint64(a.hi), a.lo, uint64(d))
	if q > math.MaxInt64 {
		return math.MaxInt64
	}
	return int64(q)
}

// ceilDiv returns a / d rounded up, limited to the range of int64. Requires: d > 0.
func (a int128) ceilDiv(d int64) int64 {
	return a.add(from64(d - 1)).floorDiv(d)
}

// clamp returns a, limited to +-2^62.
func (a int128) clamp() int64 {
	const end = 1 << 62
	if x := int64(a.lo); a.hi == x>>63 {
		return max(-end, min(end, x))
	}
	if a.hi < 0 {
		return -end
	}
	return end
}
