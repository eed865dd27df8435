package compress

import (
	"bufio"
	"encoding/binary"
	"hash/crc32"
	"io"

	"github.com/klauspost/compress/s2"
)

// Packer compresses one direction of a stream.
type Packer interface {
	// Append appends the compressed bytes of src to dst, so that the peer can read all of src,
	// and returns dst. It keeps neither slice.
	Append(dst, src []byte) []byte
}

// The framing format of Snappy: a stream is a sequence of chunks. The first chunk is the
// identifier.
//
//	[x]  [x][x][x]       [x][x][x][x]       [x]...
//	type  length of      masked CRC-32C     data
//	      the rest       of the plain data
const (
	chunkCompressed = 0x00
	chunkPlain      = 0x01
	chunkHeader     = 8       // including the checksum
	chunkMost       = 1 << 16 // bytes of plain data
	snappyStart     = "\xff\x06\x00\x00sNaPpY"
)

// Snappy packs in Snappy's framing format. The zero value is the start of a stream.
//
// The library's stream writer holds 75 kB for each connection; Snappy holds one bit.
type Snappy struct{ started bool }

// Append implements Packer.
func (s *Snappy) Append(dst, src []byte) []byte {
	if !s.started {
		dst = append(dst, snappyStart...)
		s.started = true
	}
	for len(src) > 0 {
		piece := src[:min(len(src), chunkMost)]
		src = src[len(piece):]
		dst = appendChunk(dst, piece)
	}
	return dst
}

func appendChunk(dst, piece []byte) []byte {
	start := len(dst)
	body := start + chunkHeader
	need := chunkHeader + s2.MaxEncodedLen(len(piece))
	if cap(dst)-start < need {
		dst = append(dst, make([]byte, need)...)
	}
	dst = dst[:start+need]
	packed := s2.EncodeSnappy(dst[body:], piece)
	kind := byte(chunkCompressed)
	// As the reference does: compress only if that saves an eighth.
	if len(packed) < len(piece)-len(piece)/8 {
		dst = dst[:body+len(packed)]
	} else {
		kind = chunkPlain
		dst = append(dst[:body], piece...)
	}
	binary.LittleEndian.PutUint32(dst[start:], uint32(len(dst)-start-4)<<8|uint32(kind))
	binary.LittleEndian.PutUint32(dst[start+4:], maskedSum(piece))
	return dst
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func maskedSum(b []byte) uint32 {
	c := crc32.Checksum(b, castagnoli)
	return (c>>15 | c<<17) + 0xa282ead8
}

// FromSnappy decompresses r, in Snappy's framing format. It reads no further than the chunk that
// a Read needs, apart from r's buffer. An error of r ends it.
func FromSnappy(r *bufio.Reader) io.Reader {
	return s2.NewReader(r, s2.ReaderMaxBlockSize(chunkMost), s2.ReaderAllocBlock(1<<10))
}
