package diskqueue

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"slices"
)

// All numbers are unsigned and big-endian; crc is CRC-32C (Castagnoli).
//
// A segment file, <number, 20 digits>.seg:
//
//	offset  bytes
//	     0      8  magic "SRTMSEG\n"                           header
//	     8      4  version, 1
//	    12      8  number of the segment, as in its name
//	    20      8  salt, drawn at random for each segment
//	    28      4  greatest length of a record
//	    32      4  crc of bytes 0-31
//	    36         records, one after the other
//	   end     44  footer, once the segment is sealed
//
// A record that begins at offset o, with n bytes of data, 1 <= n <= the
// greatest length:
//
//	0      4  crc of bytes 4 to 8+n, continued from that of the segment's
//	          number and salt, XOR the low 32 bits of o
//	4      4  n
//	8      n  data
//
// The number, the salt and the offset are in the checksum so that bytes which
// are a record elsewhere are none here: a file system may show, after a loss of
// power, blocks of deleted files in a file that was being written. An empty
// record is not allowed, so that zeros, which it may show as well, are none.
//
// The footer that begins at offset o, and is the end of the file:
//
//	 0      4  crc of bytes 4-43, XOR the low 32 bits of o
//	 4      4  0xffffffff, which is no record's length
//	 8      8  number   ┐
//	16      8  salt     ├ as in the header, to read the segment without it
//	24      4  greatest ┘
//	28      8  number of records
//	36      8  magic "SRTMEND\n"
//
// The cursor file, named cursor: everything before the position is done with.
//
//	 0      8  magic "SRTMCUR\n"
//	 8      4  version, 1
//	12      8  number of the segment
//	20      8  offset in it
//	28      8  number of its records before the offset
//	36      4  crc of bytes 0-35
const (
	segmentMagic = "SRTMSEG\n"
	footerMagic  = "SRTMEND\n"
	cursorMagic  = "SRTMCUR\n"
	version      = 1

	headerSize  = 36
	recordExtra = 8 // bytes of a record that are not its data
	footerSize  = 44
	cursorSize  = 40
	footerMark  = 0xffffffff
)

// maxRecordLimit bounds Config.MaxRecord: lengths stay far from footerMark,
// and sums of a few of them within 32 bits.
const maxRecordLimit = 1 << 30

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// identity is what the header and the footer of a segment have in common.
type identity struct {
	number    uint64
	salt      uint64
	maxRecord uint32
}

// layout is what it takes to tell a segment's records from other bytes.
type layout struct {
	seed uint32 // the checksum of number and salt
	max  uint32 // greatest length of a record
}

func (id identity) layout() layout {
	var b [16]byte
	binary.BigEndian.PutUint64(b[0:], id.number)
	binary.BigEndian.PutUint64(b[8:], id.salt)
	return layout{seed: crc32.Checksum(b[:], castagnoli), max: id.maxRecord}
}

func appendHeader(dst []byte, id identity) []byte {
	from := len(dst)
	dst = append(dst, segmentMagic...)
	dst = binary.BigEndian.AppendUint32(dst, version)
	dst = binary.BigEndian.AppendUint64(dst, id.number)
	dst = binary.BigEndian.AppendUint64(dst, id.salt)
	dst = binary.BigEndian.AppendUint32(dst, id.maxRecord)
	return binary.BigEndian.AppendUint32(dst, crc32.Checksum(dst[from:], castagnoli))
}

// parseHeader reports false for anything but an intact header. The error is a
// *VersionError, for an intact header of a version that is not ours.
// Requires: len(b) == headerSize.
func parseHeader(b []byte) (id identity, ok bool, err error) {
	if string(b[:8]) != segmentMagic || binary.BigEndian.Uint32(b[32:]) != crc32.Checksum(b[:32], castagnoli) {
		return identity{}, false, nil
	}
	if v := binary.BigEndian.Uint32(b[8:]); v != version {
		return identity{}, false, &VersionError{Version: v}
	}
	id = identity{
		number:    binary.BigEndian.Uint64(b[12:]),
		salt:      binary.BigEndian.Uint64(b[20:]),
		maxRecord: binary.BigEndian.Uint32(b[28:]),
	}
	return id, id.maxRecord <= maxRecordLimit, nil
}

// appendFooter appends the footer of a segment of so many records that begins
// at offset off of its file.
func appendFooter(dst []byte, id identity, records, off int64) []byte {
	from := len(dst)
	dst = append(dst, 0, 0, 0, 0)
	dst = binary.BigEndian.AppendUint32(dst, footerMark)
	dst = binary.BigEndian.AppendUint64(dst, id.number)
	dst = binary.BigEndian.AppendUint64(dst, id.salt)
	dst = binary.BigEndian.AppendUint32(dst, id.maxRecord)
	dst = binary.BigEndian.AppendUint64(dst, uint64(records))
	dst = append(dst, footerMagic...)
	binary.BigEndian.PutUint32(dst[from:], crc32.Checksum(dst[from+4:], castagnoli)^uint32(off))
	return dst
}

// parseFooter reports false for anything but an intact footer of a segment
// whose records could be that many.
// Requires: len(b) == footerSize.
func parseFooter(b []byte, off int64) (id identity, records int64, ok bool) {
	if binary.BigEndian.Uint32(b) != crc32.Checksum(b[4:], castagnoli)^uint32(off) ||
		binary.BigEndian.Uint32(b[4:]) != footerMark || string(b[36:]) != footerMagic {
		return identity{}, 0, false
	}
	id = identity{
		number:    binary.BigEndian.Uint64(b[8:]),
		salt:      binary.BigEndian.Uint64(b[16:]),
		maxRecord: binary.BigEndian.Uint32(b[24:]),
	}
	count := binary.BigEndian.Uint64(b[28:])
	if id.maxRecord > maxRecordLimit || off < headerSize || count > uint64(off-headerSize)/(recordExtra+1) {
		return identity{}, 0, false
	}
	return id, int64(count), true
}

// appendRecord appends the record of data that begins at offset off of the
// segment's file.
func (l layout) appendRecord(dst []byte, data []byte, off int64) []byte {
	from := len(dst)
	dst = slices.Grow(dst, recordExtra+len(data))
	dst = append(dst, 0, 0, 0, 0)
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(data)))
	dst = append(dst, data...)
	binary.BigEndian.PutUint32(dst[from:], l.check(dst[from+4:], off))
	return dst
}

// check is a record's checksum; b is its length and data, off its offset.
func (l layout) check(b []byte, off int64) uint32 {
	return crc32.Update(l.seed, castagnoli, b) ^ uint32(off)
}

// size returns the size of the record that begins at off with the bytes in b,
// as far as its length can be believed: not if it is more than the segment
// allows, or than there is up to end.
// Requires: len(b) >= recordExtra.
func (l layout) size(b []byte, off, end int64) (int64, bool) {
	n := binary.BigEndian.Uint32(b[4:])
	size := recordExtra + int64(n)
	return size, n > 0 && n <= l.max && size <= end-off
}

// intact reports whether b is, whole, a record that begins at off.
func (l layout) intact(b []byte, off int64) bool {
	return binary.BigEndian.Uint32(b) == l.check(b[4:], off)
}

func appendCursor(dst []byte, p Position) []byte {
	from := len(dst)
	dst = append(dst, cursorMagic...)
	dst = binary.BigEndian.AppendUint32(dst, version)
	dst = binary.BigEndian.AppendUint64(dst, p.segment)
	dst = binary.BigEndian.AppendUint64(dst, uint64(p.offset))
	dst = binary.BigEndian.AppendUint64(dst, uint64(p.index))
	return binary.BigEndian.AppendUint32(dst, crc32.Checksum(dst[from:], castagnoli))
}

// parseCursor is to the cursor file what parseHeader is to a header.
func parseCursor(b []byte) (p Position, ok bool, err error) {
	if len(b) != cursorSize || string(b[:8]) != cursorMagic ||
		binary.BigEndian.Uint32(b[36:]) != crc32.Checksum(b[:36], castagnoli) {
		return Position{}, false, nil
	}
	if v := binary.BigEndian.Uint32(b[8:]); v != version {
		return Position{}, false, &VersionError{Version: v}
	}
	p = Position{
		segment: binary.BigEndian.Uint64(b[12:]),
		offset:  int64(binary.BigEndian.Uint64(b[20:])),
		index:   int64(binary.BigEndian.Uint64(b[28:])),
	}
	return p, p.offset >= headerSize && p.index >= 0 && p.index <= p.offset, nil
}

// VersionError says that a file is intact, and of a format version that this
// program does not know: it was written by a later one.
type VersionError struct {
	Version uint32
}

func (e *VersionError) Error() string {
	return fmt.Sprintf("file format version %d, this program knows version %d only", e.Version, version)
}
