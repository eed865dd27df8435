package stamp

// PackMeta returns the meta of the record r with the given index. PackMeta limits r.Size to its 19 bits, which are
// enough for the kernel's largest super-segment.
func PackMeta(index uint64, r Record) Meta {
	m := Meta(r.Seq)<<32 | Meta(min(r.Size, sizeMask))<<12 | Meta(index&markMask)
	if r.First {
		m |= firstBit
	}
	return m
}
