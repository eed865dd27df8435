package histogram

import (
	"iter"
	"math/bits"
	"time"
)

// cells holds a number for each bucket, in blocks allocated on demand. The zero value
// holds 0 everywhere.
type cells[T int64 | float64] struct {
	blocks [(Buckets + blockLen - 1) / blockLen]*[blockLen]T
}

const blockLen = 64

// at returns the cell of a bucket for writing.
func (c *cells[T]) at(i int) *T {
	b := c.blocks[i/blockLen]
	if b == nil {
		b = new([blockLen]T)
		c.blocks[i/blockLen] = b
	}
	return &b[i%blockLen]
}

// get returns the value of a bucket's cell.
func (c *cells[T]) get(i int) T {
	if b := c.blocks[i/blockLen]; b != nil {
		return b[i%blockLen]
	}
	return 0
}

// all yields the nonzero cells in order.
func (c *cells[T]) all() iter.Seq2[int, T] {
	return func(yield func(int, T) bool) {
		for i, b := range c.blocks {
			if b == nil {
				continue
			}
			for j, v := range b {
				if v != 0 && !yield(i*blockLen+j, v) {
					return
				}
			}
		}
	}
}

// reset sets all cells to 0. It frees the blocks that were unused since the last reset.
func (c *cells[T]) reset() {
	for i, b := range c.blocks {
		switch {
		case b == nil:
		case *b == [blockLen]T{}:
			c.blocks[i] = nil
		default:
			clear(b[:])
		}
	}
}

// bucketOf returns the bucket of a duration >= 0. Up to 255 us each microsecond has its
// own bucket; above, each doubling has 128 buckets.
func bucketOf(d time.Duration) int {
	micros := uint64((min(d, MaxLatency) + time.Microsecond - 1) / time.Microsecond)
	shift := max(0, bits.Len64(micros)-8)
	return shift*128 + int(micros>>shift)
}

// BucketRange returns the smallest and the largest microsecond count of a bucket.
func BucketRange(i int) (low, high int64) {
	shift := max(0, i/128-1)
	low = int64(i-shift*128) << shift
	return low, low + 1<<shift - 1
}
