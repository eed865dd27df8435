package stamp

// PackMeta makes the meta of the record r with that index. r.Size is cut to
// its 19 bits, which the kernel's largest super-segment does not exceed.
func PackMeta(index uint64, r Record) Meta {
	m := Meta(r.Seq)<<32 | Meta(min(r.Size, sizeMask))<<12 | Meta(index&markMask)
	if r.First {
		m |= firstBit
	}
	return m
}
