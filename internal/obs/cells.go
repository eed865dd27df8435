package obs

import (
	"iter"
	"math/bits"
	"time"
)

// cells has a number for each bucket, in blocks that are made when they are
// needed. The zero value has 0 in all.
type cells[T int64 | float64] struct {
	blocks [(buckets + blockLen - 1) / blockLen]*[blockLen]T
}

const blockLen = 64

// at returns the cell of a bucket, to be changed.
func (c *cells[T]) at(i int) *T {
	b := c.blocks[i/blockLen]
	if b == nil {
		b = new([blockLen]T)
		c.blocks[i/blockLen] = b
	}
	return &b[i%blockLen]
}

// get returns what is in the cell of a bucket.
func (c *cells[T]) get(i int) T {
	if b := c.blocks[i/blockLen]; b != nil {
		return b[i%blockLen]
	}
	return 0
}

// all are the cells that are not 0, in order.
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

// reset sets all to 0. It gives the blocks back that were not used since the last.
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

// bucketOf is where a duration >= 0 is counted: up to 255 us in a
// bucket for each, and then in 128 for each doubling.
func bucketOf(d time.Duration) int {
	micros := uint64((min(d, MaxLatency) + time.Microsecond - 1) / time.Microsecond)
	shift := max(0, bits.Len64(micros)-8)
	return shift*128 + int(micros>>shift)
}

// bucketRange is the smallest and the largest of the microseconds that are counted
// in a bucket.
func bucketRange(i int) (low, high int64) {
	shift := max(0, i/128-1)
	low = int64(i-shift*128) << shift
	return low, low + 1<<shift - 1
}
