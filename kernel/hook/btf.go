package hook

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
)

// errBTF reports type information that violates its format.
var errBTF = errors.New("malformed kernel type information")

// The kernel's type information (BTF), in the machine's byte order. It begins with a header:
//
//	magic 0xeb9f (2), version (1), flags (1), header size (4),
//	types' offset (4), size (4), strings' offset (4), size (4)
//
// Types and strings follow, at offsets from the header's end. A type consists of name (4, an offset
// in the strings), info (4), size or type (4), and additional data that depends on its kind. The
// low 16 bits of info are the number of additional items, bits 24 to 28 are the kind.
const (
	btfMagic      = 0xeb9f
	btfHeader     = 24
	btfType       = 12
	btfStruct     = 4
	btfMember     = 12 // name, type, offset in bits
	btfBitfields  = 1 << 31
	btfMaxHeaders = 1 << 12
)

// btfAdded is the additional data of each kind: bytes once, and bytes for each item.
var btfAdded = [...]struct{ fixed, perMember int }{
	1:  {4, 0},  // integer
	2:  {0, 0},  // pointer
	3:  {12, 0}, // array
	4:  {0, btfMember},
	5:  {0, btfMember}, // union
	6:  {0, 8},         // enum
	7:  {0, 0},         // forward
	8:  {0, 0},         // typedef
	9:  {0, 0},         // volatile
	10: {0, 0},         // const
	11: {0, 0},         // restrict
	12: {0, 0},         // function
	13: {0, 8},         // function prototype
	14: {4, 0},         // variable
	15: {0, 12},        // section
	16: {0, 0},         // float
	17: {4, 0},         // declaration tag
	18: {0, 0},         // type tag
	19: {0, 12},        // enum of 64 bits
}

// membersAt returns the offsets, in bytes, of members of the named struct. It reads no more than
// necessary and keeps no reference to btf.
func membersAt(btf []byte, name string, members ...string) ([]uint32, error) {
	order := binary.NativeEndian
	if len(btf) < btfHeader || order.Uint16(btf) != btfMagic {
		return nil, fmt.Errorf("%w: no header", errBTF)
	}
	header := uint64(order.Uint32(btf[4:]))
	section := func(at int) ([]byte, error) {
		from := header + uint64(order.Uint32(btf[at:]))
		to := from + uint64(order.Uint32(btf[at+4:]))
		if header < btfHeader || header > btfMaxHeaders || to > uint64(len(btf)) {
			return nil, fmt.Errorf("%w: parts outside", errBTF)
		}
		return btf[from:to], nil
	}
	types, err := section(8)
	if err != nil {
		return nil, err
	}
	texts, err := section(16)
	if err != nil {
		return nil, err
	}
	isMember := func(at uint32, name string) bool {
		return uint64(at) < uint64(len(texts)) && bytes.HasPrefix(texts[at:], []byte(name)) &&
			len(texts) > int(at)+len(name) && texts[int(at)+len(name)] == 0
	}
	for len(types) > 0 {
		if len(types) < btfType {
			return nil, fmt.Errorf("%w: half a type", errBTF)
		}
		info := order.Uint32(types[4:])
		kind, count := info>>24&31, int(info&0xffff)
		if kind == 0 || int(kind) >= len(btfAdded) {
			return nil, fmt.Errorf("%w: kind %d", errBTF, kind)
		}
		size := btfType + btfAdded[kind].fixed + count*btfAdded[kind].perMember
		if len(types) < size {
			return nil, fmt.Errorf("%w: half a type", errBTF)
		}
		if kind == btfStruct && isMember(order.Uint32(types), name) {
			return findMembers(types[btfType:size], info&btfBitfields != 0, isMember, members)
		}
		types = types[size:]
	}
	return nil, fmt.Errorf("the kernel has no struct %s", name)
}

func findMembers(list []byte, bitfields bool, isMember func(uint32, string) bool, members []string) ([]uint32, error) {
	offsets := make([]uint32, len(members))
	for i, name := range members {
		found := false
		for m := list; len(m) > 0; m = m[btfMember:] {
			if !isMember(binary.NativeEndian.Uint32(m), name) {
				continue
			}
			bits := binary.NativeEndian.Uint32(m[8:])
			if bitfields { // then the top 8 bits are the size of a bit field
				if bits>>24 != 0 {
					break
				}
			}
			if bits%8 == 0 {
				offsets[i], found = bits/8, true
			}
			break
		}
		if !found {
			return nil, fmt.Errorf("the kernel's struct has no member %s, or not by itself", name)
		}
	}
	return offsets, nil
}
